"""Models by the name of their configuration, on fake tensors: `hf:FOLDER`, `timm:NAME`.

No weight is allocated or downloaded. `hf:` takes a folder with config.json, such a file, or a name
on the hub; `timm:` a name of timm's.
"""

from __future__ import annotations

import copy
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from ..errors import InputError, first_line
from ..torch_private.fake_tensors import FakeTensorMode
from ..trace.fakes import fake_batch, fake_model
from .hosted import library
from .kinds import TrainedClass
from .limits import check_sizes, counted_modules
from .quantized import FourBits, quantization_of, quantize_linear

PREFIXES = ("hf:", "timm:")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_DEPTHS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


@dataclass(frozen=True)
class Configured:
    """A model that a configuration describes, and the batch it trains on.

    Args:
        name: "hf:FOLDER", "hf:NAME" or "timm:NAME".
        tokens: Length of an example.
        batch: Examples in a batch.
        dtype: Of the weights, "bf16", "fp16" or "fp32"; by default as the configuration says,
            else FP32.
        lora: Settings of PEFT's LoRA, such as "r=16" or "r=16,alpha=32,targets=all-linear".
        quantize: "nf4": frozen weights of linear layers as bitsandbytes stores them.

    Examples:
        >>> given = ss.Configured("hf:examples/tiny-llama", tokens=32)
        >>> fake_model, fake_batch = given.build()
    """

    name: str
    tokens: int = 2048
    batch: int = 1
    dtype: str | None = None
    lora: str | None = None
    quantize: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise InputError(
                f"a configuration is named by text, got a {type(self.name).__name__}",
                hint="hf:FOLDER, hf:NAME or timm:NAME; of a model of yours, ss.plan(…, budget=…)",
            )
        if not isinstance(self.lora, str | None):
            raise InputError(f"lora cannot be {self.lora!r}", hint='text, such as lora="r=16"')
        if self.dtype is not None and self.dtype not in DTYPES:
            raise InputError(f"unknown type {self.dtype!r}", hint="one of " + ", ".join(DTYPES))
        if self.quantize not in (None, "nf4"):
            raise InputError(f"unknown quantization {self.quantize!r}", hint="nf4")
        if self.quantize is not None:
            self._check_frozen()
        for what, size in (("batch", self.batch), ("tokens", self.tokens)):
            if not isinstance(size, int) or not 1 <= size <= 10**9:
                raise InputError(f"{what} cannot be {size!r}", hint="a whole number from 1 to 10^9")

    def _check_frozen(self) -> None:
        if self.lora is None:
            raise InputError("4-bit weights do not train", hint="add --lora r=16")

    @property
    def unit(self) -> str:
        """The contents of a batch."""
        return "images" if self._images else "sequences"

    @cached_property
    def _images(self) -> bool:
        return self.name.startswith("timm:") or self._kind.images

    @property
    def has_context(self) -> bool:
        """Whether its length can be chosen."""
        return not self._images

    @property
    def lengths(self) -> tuple[int, int]:
        """Two that it takes, which tell how its memory grows with tokens."""
        most = min(self.longest or 8192, 8192)
        return max(most // 4, 1), max(most, 2)

    @property
    def batches(self) -> tuple[int, int]:
        """The same for examples; those asked for are traced anyway."""
        return self.batch, 4 * max(self.batch, 4)

    @property
    def longest(self) -> int | None:
        """Tokens it has positions for; None where they are computed, or there are none."""
        if not self.has_context:
            return None
        config = self._configuration
        if hasattr(config, "rope_parameters"):
            return None
        return getattr(config, "max_position_embeddings", None) or getattr(
            config, "n_positions", None
        )

    @cached_property
    def _configuration(self) -> Any:
        name = self.name.removeprefix("hf:")
        with library("transformers", "5.0", "hf"):
            from transformers import AutoConfig, PreTrainedConfig
        hint = "a folder with config.json, the file itself, or a name on the hub such as gpt2"
        if not name:
            raise InputError("hf: needs the name of a configuration", hint=hint)
        path = Path(name)
        if path.suffix == ".json" and not path.is_file():
            raise InputError(f"there is no file {name}", hint=hint)
        if path.is_dir() and not (path / "config.json").is_file():
            raise InputError(f"the folder {name} has no config.json", hint=hint)
        if path.exists() and not (path.is_dir() or path.is_file()):  # a FIFO would be waited for
            raise InputError(f"{name} is not a plain file", hint=hint)
        loud = logging.getLogger("transformers")
        level = loud.level
        loud.setLevel(logging.ERROR)
        try:
            # Unless told so, transformers asks on stdin whether to run the code beside it.
            how = {"local_files_only": not _hub_is_there(path), "trust_remote_code": False}
            held = PreTrainedConfig.get_config_dict(name, **how)[0]
            check_sizes(held)
            _check_type(name, held.get("model_type"))
            return AutoConfig.from_pretrained(name, **how)
        except InputError:
            raise
        except Exception as error:
            if path.exists():
                told = f"cannot be read: {_brief(error)}"
            elif _hub_is_there(path):
                told = "is not here, and the hub does not give it"
            else:
                told = "is not here, and there is no network to ask the hub"
            raise InputError(f"the configuration {name} {told}", hint=hint) from None
        finally:
            loud.setLevel(level)

    @cached_property
    def _kind(self) -> TrainedClass:
        return TrainedClass.of(self._configuration, self.name)

    @property
    def trains_as(self) -> str:
        """The class that is trained, where the configuration does not name it; else ""."""
        if self.name.startswith("timm:") or self._kind.named:
            return ""
        return str(self._kind.model.__name__)

    @cached_property
    def depth(self) -> int | None:
        """Its repeated layers, where the configuration says how many; None where it does not."""
        if self.name.startswith("timm:"):
            return None
        config = self._configuration
        kinds = getattr(config, "layer_types", None) or ["alike"]
        if getattr(config, "is_encoder_decoder", False) or len(set(kinds)) > 1:
            return None
        given = (getattr(config, name, None) for name in _DEPTHS)
        return next((depth for depth in given if isinstance(depth, int)), None)

    def with_layers(self, layers: int) -> Configured:
        """The same model with another number of layers.

        Args:
            layers: How many.

        Returns:
            Another configuration.
        """
        config = copy.deepcopy(self._configuration)
        for name in _DEPTHS:
            if isinstance(getattr(config, name, None), int):
                setattr(config, name, layers)
                break
        if isinstance(getattr(config, "layer_types", None), list):
            config.layer_types = (config.layer_types * layers)[:layers]
        made = replace(self)
        made.__dict__["_configuration"] = config
        return made

    def sized(self, *, batch: int | None = None, tokens: int | None = None) -> Configured:
        """The same model on another batch.

        Args:
            batch: Examples in a batch; None keeps the number.
            tokens: Length of an example; None keeps it.

        Returns:
            Another configuration.
        """
        made = replace(self, batch=batch or self.batch, tokens=tokens or self.tokens)
        made.__dict__.update({k: v for k, v in self.__dict__.items() if k == "_configuration"})
        return made

    def build(self) -> tuple[nn.Module, Any]:
        """The model and a batch, without memory."""
        quiet = logging.getLogger("transformers")
        level = quiet.level
        quiet.setLevel(logging.ERROR)
        try:
            # On "meta" modules can still be moved and converted.
            with torch.device("meta"), counted_modules(self.name):
                model, batch = self._built()
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            return fake_model(model, mode)[0], fake_batch(batch, mode)
        finally:
            quiet.setLevel(level)

    def _built(self) -> tuple[nn.Module, Any]:
        if self.name.startswith("timm:"):
            model, batch = self._from_timm()
        else:
            model, batch = self._from_transformers()
        model.train()
        if self.lora is not None:
            model.requires_grad_(False)
        if (stored := self._stored) is not None:
            quantize_linear(model, _width(model), stored)
        if self.lora is not None:
            model = _with_lora(model, self.lora)
        return model, batch

    @property
    def _stored(self) -> FourBits | None:
        """How frozen weights are stored: as asked for, or as the configuration says."""
        if self.quantize is not None:
            return FourBits()
        if self.name.startswith("timm:"):
            return None
        stored = quantization_of(self._configuration, self.name)
        if stored is not None:
            self._check_frozen()
        return stored

    def _from_transformers(self) -> tuple[nn.Module, Any]:
        config, kind = self._configuration, self._kind
        own = getattr(config, "dtype", None)
        dtype = DTYPES[self.dtype] if self.dtype else own or torch.float32
        try:
            model = kind.model._from_config(config, dtype=dtype)
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"{self.name} cannot be built: {_brief(error)}", hint="check its configuration"
            ) from None
        if not kind.images:
            self._check_length()
        kind.prepare(model)
        return model, kind.batch(config, self.batch, self.tokens, dtype)

    def _check_length(self) -> None:
        if self.longest and self.tokens > self.longest:
            raise InputError(
                f"{self.name} takes {self.longest} tokens, not {self.tokens}",
                hint=f"--tokens up to {self.longest}",
            )

    def _from_timm(self) -> tuple[nn.Module, Any]:
        with library("timm", "1.0", "timm"):
            import timm
        name = self.name.removeprefix("timm:")
        if not timm.is_model(name):
            alike = timm.list_models(f"*{name.split('_')[0]}*")[:3] if name else []
            raise InputError(
                f"timm has no model {name!r}",
                hint="one of timm.list_models()"
                + (f", such as {', '.join(alike)}" if alike else ""),
            )
        model: Any = timm.create_model(name)
        dtype = DTYPES[self.dtype] if self.dtype else torch.float32
        size = model.default_cfg["input_size"]
        images = torch.zeros(self.batch, *size, dtype=dtype)
        return model.to(dtype), (images, torch.zeros(self.batch, dtype=torch.int64))


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    """The model's own loss, or cross entropy of its scores."""
    if isinstance(batch, dict):
        return model(**batch).loss
    images, labels = batch
    return nn.functional.cross_entropy(model(images).float(), labels)


def _width(model: nn.Module) -> torch.dtype:
    return next(p.dtype for p in model.parameters() if p.is_floating_point())


def _with_lora(model: nn.Module, text: str) -> nn.Module:
    with library("peft", "0.10", "hf"):
        from peft import LoraConfig, get_peft_model
    known: dict[str, tuple[str, Callable[[str], Any]]] = {
        "r": ("r", int),
        "alpha": ("lora_alpha", int),
        "dropout": ("lora_dropout", float),
        "targets": ("target_modules", lambda v: v if v == "all-linear" else v.split("+")),
    }
    given: dict[str, Any] = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            setting, read = known[name.strip()]
            given[setting] = read(value.strip())
        except (KeyError, ValueError):
            raise InputError(
                f"cannot read --lora {text!r}",
                hint="r=16, or r=16,alpha=32,dropout=0.05,targets=q_proj+v_proj (or all-linear)",
            ) from None
    try:
        return get_peft_model(model, LoraConfig(**given))
    except Exception as error:  # for settings that nobody means, nearly anything
        raise InputError(
            f"LoRA does not fit this model: {_brief(error)}", hint="--lora r=16,targets=all-linear"
        ) from None


def _check_type(name: str, kind: Any) -> None:
    """InputError for a family that the installed transformers does not have."""
    from transformers import CONFIG_MAPPING, __version__

    if isinstance(kind, str) and kind not in CONFIG_MAPPING:
        raise InputError(
            f"{name}: transformers {__version__} has no model type {kind[:60]!r}",
            hint="a newer transformers may; for code of your own give package.module:factory",
        )


def _hub_is_there(path: Path) -> bool:
    """Asked before a library does, which tries again for half a minute."""
    if path.exists() or os.environ.get("HF_HUB_OFFLINE") == "1":
        return False
    place = urlsplit(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    try:
        socket.create_connection((place.hostname or "", place.port or 443), timeout=5).close()
    except OSError:
        return bool(os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"))
    return True


def _brief(error: BaseException) -> str:
    return first_line(error)[:160]
