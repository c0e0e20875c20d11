"""JPEGs per second through torchvision's ImageFolder and a DataLoader.

Default: Pillow and torchvision.transforms. Best: torchvision's own decoder
(libjpeg-turbo) and transforms.v2 on tensors.
"""
import argparse
import json
import time
from pathlib import Path

import torch
import torchvision

MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]


def make_folder(path, best):
    if not best:
        from torchvision import transforms

        return torchvision.datasets.ImageFolder(
            path,
            transforms.Compose(
                [
                    transforms.RandomResizedCrop(224),
                    transforms.RandomHorizontalFlip(),
                    transforms.ToTensor(),
                    transforms.Normalize(MEAN, STD),
                ]
            ),
        )
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2

    return torchvision.datasets.ImageFolder(
        path,
        v2.Compose(
            [
                v2.RandomResizedCrop(224, antialias=True),
                v2.RandomHorizontalFlip(),
                v2.ToDtype(torch.float32, scale=True),
                v2.Normalize(MEAN, STD),
            ]
        ),
        loader=lambda file: decode_jpeg(read_file(file), ImageReadMode.RGB),
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--best", action="store_true")
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    loader = torch.utils.data.DataLoader(
        make_folder(options.folder, options.best),
        batch_size=options.batch,
        shuffle=True,
        num_workers=options.workers,
    )
    # From the first batch on: starting the workers is not counted.
    images, start = 0, None
    for inputs, _ in loader:
        if start is None:
            start = time.perf_counter()
        else:
            images += len(inputs)
    rate = images / (time.perf_counter() - start)
    Path(options.out).write_text(json.dumps({"images_per_second": rate}))


if __name__ == "__main__":
    main()
