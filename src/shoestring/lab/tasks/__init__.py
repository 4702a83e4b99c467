"""Data to train on, by name or by folder.

`digits` comes with scikit-learn and `number_words` with this package; `cifar10` and texts in two
languages (`multi30k`, `iwslt14`, `europarl160k`, or any folder of them) are read from a folder,
as are images of one's own (`image_folder.py`).
"""

from __future__ import annotations

import os
from pathlib import Path

from ...errors import InputError
from .image_folder import image_folder, is_image_folder
from .images import ImageTask, image_shape
from .text import TextTask

IMAGES = ("digits", "cifar10")
SHAPE = (3, 32, 32)
"""Of the images of both: models and predictions need not read them."""
TEXTS = ("number_words", "multi30k", "iwslt14", "europarl160k")
NAMES = (*IMAGES, *TEXTS)
SPLITS = ("test", "validation")
_INSIDE = {"iwslt14": ("iwslt14.tokenized.de-en", "iwslt14/de-en", "de-en", "orig/de-en")}

__all__ = [
    "IMAGES", "NAMES", "SHAPE", "SPLITS", "TEXTS", "ImageTask", "TextTask", "is_there",
    "load_images", "load_task", "load_text",
]  # fmt: skip


def load_task(
    name: str,
    *,
    folder: str | Path | None = None,
    split: str = "test",
    seed: int = 0,
    languages: str | None = None,
    merges: int | None = None,
    input: str | None = None,
) -> ImageTask | TextTask:
    """The task of that name, or the images or the text in the folder of that name.

    `split` is what is evaluated: "test", after training on all training images, or "validation",
    a part of the training images that `seed` draws and training leaves out (5,000 of CIFAR-10's
    50,000, as in the report). A text has a validation part of its own. `input` is the shape that
    images are brought to, "1x28x28".
    """
    if split not in SPLITS:
        raise InputError(f"unknown split {split!r}", hint="one of " + ", ".join(SPLITS))
    images = name in IMAGES or is_image_folder(name)
    if images and (languages or merges is not None):
        raise InputError(f"{name} has no {'languages' if languages else 'merges'}: it is images")
    if images:
        task = load_images(name, folder=folder, split=split, seed=seed)
        return task if input is None else task.resized(image_shape(input))
    if input is not None:
        raise InputError(f"--input is the shape of an image, and {name} is text")
    return load_text(name, folder=folder, languages=languages, merges=merges).with_split(split)


def load_images(
    name: str, *, folder: str | Path | None = None, split: str = "test", seed: int = 0
) -> ImageTask:
    """Images of that name."""
    if name == "digits":
        from .digits import digits

        return digits(split, seed)
    if is_image_folder(name):
        return image_folder(name, split, seed)
    from .cifar10 import cifar10

    return cifar10(folder, split, seed)


def load_text(
    name: str,
    *,
    folder: str | Path | None = None,
    languages: str | None = None,
    merges: int | None = None,
) -> TextTask:
    """A text in two languages, encoded; the work is done once and kept beside it."""
    from .prepared import numbers_prepared, text_in

    if merges is not None and merges < 0:
        raise InputError(f"{merges} merges is below 0")
    if name == "number_words":
        if languages is not None or merges is not None:
            raise InputError("number_words is from German to English, with codes of its own")
        return numbers_prepared()
    where = _text_folder(name, folder)
    name = where.name or where.resolve().name  # the folder one is in
    return text_in(where, name, merges=merges, languages=languages)


def is_there(name: str, folder: str | Path | None) -> bool:
    """Whether a text can be read: it is made here, or its folder is there."""
    try:
        return name == "number_words" or bool(_text_folder(name, folder))
    except InputError:
        if name in TEXTS:
            return False
        raise


def _text_folder(name: str, folder: str | Path | None) -> Path:
    """A folder named itself, or one of a known name in the folder of all data."""
    if Path(name).is_dir() and (name not in TEXTS or folder is None):
        return Path(name)
    if name in NAMES and name not in TEXTS:
        raise InputError(
            f"{name} is not text", hint="one of " + ", ".join(TEXTS) + ", or a folder of text"
        )
    if name not in TEXTS:
        raise InputError(
            f"no data is called {name!r}, and it is not a folder",
            hint="one of " + ", ".join(NAMES) + ", or a folder of text or images",
        )
    given = folder if folder is not None else os.environ.get("SHOESTRING_DATA")
    if not given:
        raise InputError(
            f"{name} needs the folder its files lie in",
            hint="name it with --data-dir or SHOESTRING_DATA: train, valid, test.{de,en}",
        )
    for inside in (name, *_INSIDE.get(name, ()), ""):
        where = Path(given) / inside
        if where.is_dir() and (any(where.glob("train*")) or (where / "pairs.npz").is_file()):
            return where
    raise InputError(
        f"no {name} in {given}", hint="a folder of train, valid, test.{de,en}, plain or .xz, .gz"
    )
