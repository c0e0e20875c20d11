"""The ring attention of PyTorch's context_parallel around the CPU's kernel.

context_parallel() puts a ring around the kernel that attention would call. Its
table has CUDA's kernels alone, and it refuses the CPU's. This calls the same
ring, a template over the kernel, without DTensor in between: PyTorch is a little
faster than it would be with its table one row longer.
"""
import torch
from torch.distributed.tensor.experimental._context_parallel import (
    _attention as template,
)
from torch.nn import functional as F

kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


def forward_kernel(q, k, v, is_causal):
    return kernel(q, k, v, 0.0, is_causal)


def backward_kernel(grad_out, query, key, value, out, logsumexp, is_causal):
    # The kernel wants rows before heads.
    rows = logsumexp.transpose(1, 2).contiguous().transpose(1, 2)
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, rows, 0.0, is_causal
    )


class RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, group):
        out, lse = template._templated_ring_attention(
            group, 2, forward_kernel, q, k, v, is_causal=True
        )
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx, gradient):
        q, k, v, out, lse = ctx.saved_tensors
        gradients = template._templated_ring_attention_backward(
            ctx.group, 2, backward_kernel, gradient, "grad_out", q, k, v, out,
            lse, is_causal=True,
        )
        return *gradients[:3], None


def attention(group):
    """Causal attention of this rank's queries, balanced by zig-zag cuts."""
    template.set_rotate_method("alltoall")
    return lambda q, k, v: RingAttention.apply(q, k, v, group)


def alone(rank, size):
    """What a rank computes in that ring, with its own keys in place of those of
    others."""
    def attend(q, k, v):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        for step in range(1, size):
            if step <= rank:
                half = k.shape[2] // 2
                part = F.scaled_dot_product_attention(
                    q, k[:, :, :half], v[:, :, :half]
                )
                out = out + part
            else:
                half = q.shape[2] // 2
                part = F.scaled_dot_product_attention(q[:, :, half:], k, v)
                out = torch.cat((out[:, :, :half], out[:, :, half:] + part), 2)
        return out

    return attend


def positions_of(length, rank, size):
    """The rank's tokens: pieces `rank` and 2 * size - 1 - rank of 2 * size."""
    pieces = torch.arange(length).chunk(2 * size)
    return torch.cat((pieces[rank], pieces[2 * size - 1 - rank]))
