"""What torchvision makes of images: the reference of torchvision_test.

make ROOT                          writes class folders of images
load ROOT OUT SIZE                 Resize, CenterCrop, ToTensor, Normalize
crop ROOT OUT SIZE index:left:top:width:height:flip ...
                                   resized_crop and hflip instead, of those
"""
import os
import sys

import numpy as np
from PIL import Image

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def picture(width, height, seed):
    """Blurred noise with an edge: something between a photo and a test chart."""
    random = np.random.default_rng(seed)
    small = random.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3))
    image = Image.fromarray(small.astype(np.uint8)).resize(
        (width, height), Image.BICUBIC)
    pixels = np.asarray(image).astype(np.int16)
    pixels[:, width // 2:] -= 60
    pixels += random.integers(-6, 7, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def make(root):
    def save(name, image, **how):
        path = os.path.join(root, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        image.save(path, **how)

    # "large": shrinks by 2 or more, so a JPEG is decoded at a reduced size.
    for i, (width, height) in enumerate(
            [(97, 70), (64, 64), (33, 50), (120, 64), (90, 91)]):
        image = picture(width, height, i)
        save(f"png/{i}_rgb.png", image)
        save(f"png/{i}_grey.png", image.convert("L"))
        save(f"png/{i}_palette.png", image.convert("P"))
        save(f"png/{i}_alpha.png", image.convert("RGBA"))
        save(f"png/{i}_black.png", image.convert("1"))
        save(f"jpeg/{i}_420.jpg", image, quality=90)
        save(f"jpeg/{i}_444.JPEG", image, quality=90, subsampling=0)
        save(f"jpeg/{i}_422.jpg", image, quality=90, subsampling=1)
        save(f"jpeg/{i}_grey.jpg", image.convert("L"), quality=90)
        save(f"jpeg/{i}_progressive.jpg", image, quality=90, progressive=True)
        save(f"jpeg/{i}_cmyk.jpg", image.convert("CMYK"), quality=95)
        big = picture(6 * width, 4 * height, 100 + i)
        save(f"large_png/{i}.png", big)
        save(f"large_jpeg/{i}.jpg", big, quality=90)


def main():
    what, root = sys.argv[1:3]
    if what == "make":
        make(root)
        return
    import torch
    from safetensors.torch import save_file
    from torchvision import datasets
    from torchvision import transforms as T
    from torchvision.transforms import functional as F

    out, size = sys.argv[3], int(sys.argv[4])
    finish = T.Compose([T.ToTensor(), T.Normalize(MEAN, STD)])
    folder = datasets.ImageFolder(root)
    inputs, targets = [], []
    if what == "load":
        for image, target in folder:
            image = T.CenterCrop(size)(T.Resize(size)(image))
            inputs.append(finish(image))
            targets.append(target)
        for path, _ in folder.samples:
            print(os.path.relpath(path, root))
    for box in sys.argv[5:]:
        index, left, top, width, height, flip = map(int, box.split(":"))
        image, target = folder[index]
        image = F.resized_crop(image, top, left, height, width, (size, size))
        inputs.append(finish(F.hflip(image) if flip else image))
        targets.append(target)
    save_file({"inputs": torch.stack(inputs),
               "targets": torch.tensor(targets)}, out)


main()
