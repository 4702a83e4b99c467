"""From a configuration alone: what fits which card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import shoestring as ss
from cli.calling import call
from shoestring import devices
from shoestring.integrations.cards import _row
from shoestring.integrations.configurations import Configured, loss_of
from shoestring.integrations.quantized import Nf4Linear
from shoestring.integrations.sizes import Sizes
from shoestring.memory.reserved import reserved
from shoestring.planning.ranks import SharedStep
from shoestring.step.trace_step import trace_plan
from shoestring.techniques.plan import Plan

transformers = pytest.importorskip("transformers", reason="needs transformers")

LLAMA = {
    "vocab_size": 2000, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 7,
    "num_attention_heads": 4, "num_key_value_heads": 2, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    transformers.LlamaConfig(**LLAMA).save_pretrained(folder)
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where it is not the layers that are of interest: two of them."""
    folder = tmp_path_factory.mktemp("short")
    transformers.LlamaConfig(**{**LLAMA, "num_hidden_layers": 2}).save_pretrained(folder)
    return f"hf:{folder}"


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("vision")
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=7, num_attention_heads=4, intermediate_size=128,
        image_size=64, architectures=["ViTForImageClassification"],
    )  # fmt: skip
    config.save_pretrained(folder)
    return f"hf:{folder}"


def exactly(name: str, plan: Plan, *, captured: bool = False, **how: Any) -> int:
    """What the whole model reserves, traced."""
    model, batch = Configured(name, **how).build()
    trace = trace_plan(
        plan, model, batch, loss=loss_of, optimizer="adamw", device="cuda", captured=captured
    )
    found = reserved(trace)
    return found.captured_bytes if captured else found.eager_bytes


@pytest.mark.slow
def test_few_layers_tell_what_all_reserve(llama: str) -> None:
    """Every figure of the table beside a trace of the whole model."""
    how: dict[str, Any] = {"tokens": 1024, "batch": 8}
    whole = exactly(llama, Plan(), **how)
    sizes = Sizes(Configured(llama, **how), "adamw")
    assert sizes.plain_bytes == whole
    assert _row(sizes, 2 * whole, 2 * whole).slower <= 1.0  # type: ignore[operator]
    tight = _row(sizes, int(0.75 * whole), 2 * whole)
    room = sizes.margin.limit(int(0.75 * whole))
    assert tight.plan is not None and tight.needed_bytes <= room
    ways = [exactly(llama, tight.plan, captured=captured, **how) for captured in (True, False)]
    assert tight.needed_bytes in ways
    smallest = sizes._for_all(sizes._whole)
    assert tight.longest_context is not None
    longest = exactly(llama, smallest, tokens=tight.longest_context, batch=1)
    assert 0.93 * room < longest <= 1.02 * room
    largest = exactly(llama, smallest, tokens=1024, batch=tight.largest_batch)
    assert 0.8 * room < largest <= 1.02 * room
    no = _row(sizes, int(0.02 * whole), 2 * whole)
    assert not no.fits and str(no).startswith("no: ") and no.largest_batch == 0
    least = sizes.least.plan  # sized once, for how many layers it may be written
    assert sizes._line(least, 8, 1024) is sizes._line(sizes._for_traced(least), 8, 1024)


def test_cards_are_what_cuda_reports_less_its_context() -> None:
    """A 24 GB card is sold as 24 * 2**30 bytes; ECC and the driver take some of them."""
    known = {card.name: card for card in devices.cards()}
    assert known["H200"].total_bytes == int(139.80 * 2**30)  # as its out-of-memory message said
    for card in known.values():
        assert 0.9 * card.gigabytes * 10**9 < card.total_bytes < 1.08 * card.gigabytes * 10**9
        assert 0 < card.context_bytes < 10**9
    assert known["L4"].usable_bytes < known["RTX 4090"].usable_bytes


@pytest.mark.slow
def test_images_have_no_context(vision: str) -> None:
    found = ss.cards(vision, batch=8, sizes=["rtx 4090", "8 GB"])
    assert [row.card for row in found.rows] == ["8 GB", "24 GB"]
    assert found.rows[1].budget_bytes == int(23.51 * 2**30) - 2**29
    assert found.rows[0].longest_context is None and found.rows[0].largest_batch > 1000
    assert found.rows[1].largest_batch == pytest.approx(3 * found.rows[0].largest_batch, rel=0.1)
    assert "8 images" in str(found) and "longest context" not in str(found)


@pytest.mark.slow
def test_several_cards_share_a_model(llama: str, short: str) -> None:
    """Each with a part of the weights: as many bytes as the whole model's trace tells by rule."""
    how: dict[str, Any] = {"tokens": 256, "batch": 4}
    ranks = SharedStep(4, "fsdp")
    sizes = Sizes(Configured(llama, **how), "adamw", ranks=ranks)
    alone = Sizes(Configured(llama, tokens=256, batch=1), "adamw")
    assert sizes.model.batch == 1 and sizes.plain_bytes < 0.9 * alone.plain_bytes
    model, batch = Configured(llama, tokens=256, batch=1).build()
    trace = trace_plan(
        Plan(), model, batch, loss=loss_of, optimizer="adamw", device="cuda", captured=False
    )
    assert sizes.plain_bytes == reserved(ranks.of_one(trace, Plan(), model, batch)).eager_bytes
    names = {t.name for point in sizes.front for t in point.plan.techniques}
    assert "sparsity" not in names
    done = call(
        "plan", short, "--tokens", 128, "--batch", 4, "--budget", "1 GB", "--gpus", 2, "--json"
    )
    assert done.status == 0, done.err
    assert json.loads(done.out)["ranks"] == 2 and json.loads(done.out)["sharding"] == "fsdp"


def test_lora_and_four_bits(llama: str) -> None:
    pytest.importorskip("peft", reason="needs peft")
    whole, _ = Configured(llama).build()
    adapted, batch = Configured(llama, lora="r=4,targets=all-linear", quantize="nf4").build()
    packed = [m for m in adapted.modules() if isinstance(m, Nf4Linear)]
    linear = [m for m in whole.modules() if type(m) is torch.nn.Linear]
    assert len(packed) == len(linear) - 1  # not the head
    elements = sum(m.weight.numel() for m in linear if m is not whole.lm_head)
    assert sum(m.weight.nbytes for m in packed) == elements // 2
    assert sum(m.absmax.nbytes for m in packed) == elements // 64
    trained = [n for n, p in adapted.named_parameters() if p.requires_grad]
    assert trained and all("lora" in name for name in trained)
    step = ss.profile(
        adapted, batch, loss=loss_of, optimizer="adamw", accounting="device", device="cuda"
    )
    roles = {role.value: size for role, size in step.bytes_by_role.items()}
    assert roles["model"] < 0.7 * sum(p.nbytes for p in whole.parameters())


def test_a_configuration_says_how_its_weights_are_stored(llama: str, tmp_path: Path) -> None:
    """Folders saved with a quantization were sized as if they had none."""
    pytest.importorskip("peft", reason="needs peft")
    held = json.loads((Path(llama.removeprefix("hf:")) / "config.json").read_text())

    def folder(**said: Any) -> str:
        (tmp_path / "config.json").write_text(json.dumps({**held, "quantization_config": said}))
        return f"hf:{tmp_path}"

    four = folder(quant_method="bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4")
    adapted, _ = Configured(four, lora="r=4").build()
    packed = {n: m for n, m in adapted.named_modules() if isinstance(m, Nf4Linear)}
    assert packed and all(m.absmax.dtype is torch.float32 for m in packed.values())
    nested = folder(load_in_4bit=True, bnb_4bit_use_double_quant=True,
                    llm_int8_skip_modules=["lm_head", "down_proj"])  # fmt: skip
    adapted, _ = Configured(nested, lora="r=4").build()
    kept = {n: m for n, m in adapted.named_modules() if isinstance(m, Nf4Linear)}
    assert set(kept) == {name for name in packed if "down_proj" not in name}
    assert all(m.absmax.dtype is torch.uint8 for m in kept.values())
    with pytest.raises(ss.InputError, match="do not train"):
        Configured(four).build()
    with pytest.raises(ss.InputError, match="quantized by gptq"):
        Configured(folder(quant_method="gptq", bits=4), lora="r=4").build()
    with pytest.raises(ss.InputError, match="8 bits"):
        Configured(folder(quant_method="bitsandbytes", load_in_8bit=True), lora="r=4").build()


def test_four_bits_train_as_they_are_sized() -> None:
    """Nothing of the whole weight is kept between the passes; gradients pass through."""
    plain = torch.nn.Linear(64, 128)
    layer = Nf4Linear(plain, torch.float32)
    x = torch.randn(2, 64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        out = layer(x)
    assert all(t.numel() < 64 * 128 for t in kept)
    out.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape
    assert not layer.weight.requires_grad


@pytest.mark.slow
def test_the_command_line(short: str, tmp_path: Path) -> None:
    page = tmp_path / "cards.html"
    done = call("cards", short, "--tokens", 128, "--card", 8, "--html", page, "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["rows"][0]["card"] == "8 GB"
    shown = page.read_text().replace("\xa0", " ")  # a size does not break over lines
    assert "<table" in shown and "8 GB" in shown
    done = call("plan", short, "--tokens", 128, "--batch", 2, "--budget", "8 GB", "--json")
    assert done.status == 0, done.err
    assert json.loads(done.out)["predicted"]["device"] == "cuda"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["hf:/no/such/folder"], "is not here"),
        (["hf:nobody/nothing"], "is not here, and"),
        (["hf:"], "needs the name"),
        (["hf:no.json"], "there is no file"),
        (["wrn-28-2"], "is not a configuration"),
        (["LLAMA", "--card", "0"], "no card '0' is known"),
        (["LLAMA", "--card", "20"], "no card '20' is known"),
        (["LLAMA", "--card", "GTX 9999"], "no card 'GTX 9999' is known"),
        (["LLAMA", "--gpus", "0"], "no step has 0 ranks"),
        (["LLAMA", "--gpus", "2", "--sharding", "tp"], "unknown sharding"),
        (["LLAMA", "--lora", "rank=3"], "cannot read --lora"),
        (["LLAMA", "--lora", "r=3,targets=nothing"], "LoRA does not fit"),
        (["LLAMA", "--quantize", "nf4"], "do not train"),
        (["LLAMA", "--quantize", "int3"], "unknown quantization"),
        (["LLAMA", "--dtype", "fp8"], "unknown type"),
        (["LLAMA", "--tokens", "0"], "tokens cannot be 0"),
        (["LLAMA", "--optimizer", "magic"], "unknown optimizer"),
    ],
)
def test_mistakes_are_one_line(
    llama: str, given: list[str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    done = call("cards", *[llama if word == "LLAMA" else word for word in given])
    assert done.refused and not done.out
    assert told in done.err and "hint: " in done.err


def test_an_8_bit_optimizer_says_when_bitsandbytes_is_missing(llama: str) -> None:
    try:
        import bitsandbytes  # noqa: F401
    except ImportError:
        with pytest.raises(ss.InputError, match="needs bitsandbytes"):
            ss.will_it_fit(llama, "8 GB", optimizer="adamw8bit")
    else:
        smaller = ss.will_it_fit(llama, "8 GB", optimizer="adamw8bit", tokens=128).needed_bytes
        assert smaller < ss.will_it_fit(llama, "8 GB", tokens=128).needed_bytes


BERT = {
    "model_type": "bert", "num_hidden_layers": 1, "hidden_size": 24, "vocab_size": 32,
    "intermediate_size": 16,
}  # fmt: skip
SMALL = {**LLAMA, "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 16}


def configured(folder: Path, config: dict[str, Any], *classes: str) -> Configured:
    (folder / "config.json").write_text(json.dumps({**config, "architectures": list(classes)}))
    return Configured(f"hf:{folder}", tokens=8, batch=2)


@pytest.mark.parametrize(
    ("config", "named", "trained"),
    [
        (BERT, "BertForSequenceClassification", "BertForSequenceClassification"),
        (
            {**BERT, "problem_type": "multi_label_classification"},
            "BertForSequenceClassification",
            "BertForSequenceClassification",
        ),
        ({**BERT, "num_labels": 1}, "BertForSequenceClassification", None),
        (BERT, "BertForTokenClassification", "BertForTokenClassification"),
        (BERT, "BertModel", "BertForMaskedLM"),
        (BERT, "BertForPreTraining", "BertForMaskedLM"),
        (SMALL, "LlamaForSequenceClassification", "LlamaForSequenceClassification"),
        ({**SMALL, "pad_token_id": 3}, "LlamaForCausalLM", "LlamaForCausalLM"),
        (SMALL, "TheirOwnForCausalLM", "LlamaForCausalLM"),
        (
            {"model_type": "gpt2", "n_layer": 1, "n_embd": 24, "pad_token_id": 3},
            "GPT2LMHeadModel",
            "GPT2LMHeadModel",
        ),
        pytest.param(
            {**BERT, "model_type": "deberta-v2", "pad_token_id": 0},
            "DebertaV2ForMaskedLM",
            "DebertaV2ForMaskedLM",
            marks=pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_the_class_that_a_configuration_names_is_traced(
    tmp_path: Path, config: dict[str, Any], named: str, trained: str | None
) -> None:
    made = configured(tmp_path, config, named)
    model, batch = made.build()
    assert type(model).__name__ == (trained or named)
    assert made.trains_as == ("" if named == (trained or named) else trained)
    assert trace_plan(Plan(), model, batch, loss=loss_of, optimizer="adamw", device="cuda").ops


@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("bert", "BertForQuestionAnswering"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("segformer", "SegformerForSemanticSegmentation"),
    ],
)
def test_a_class_whose_batch_is_not_known_is_refused_by_its_name(
    tmp_path: Path, kind: str, named: str
) -> None:
    with pytest.raises(ss.InputError, match=f"what {named} trains on"):
        configured(tmp_path, {"model_type": kind}, named).build()


TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
         "num_attention_heads": 2, "image_size": 32, "patch_size": 8}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "named", "told"),
    [
        ("clip", "CLIPModel", "CLIPModel trains on images and texts that it compares"),
        ("siglip", "", "SiglipModel trains on images and texts that it compares"),
        ("gemma3", "Gemma3ForConditionalGeneration", "trains on images and text"),
        ("gemma3", "", "trains on images and text"),
    ],
)
def test_a_model_of_images_and_text_is_not_sized_as_a_part_of_it(
    tmp_path: Path, kind: str, named: str, told: str
) -> None:
    """As a classifier, or on text alone, in silence."""
    with pytest.raises(ss.InputError, match=told) as caught:
        configured(tmp_path, {"model_type": kind}, *[named] if named else []).build()
    assert "package.module:factory" in str(caught.value.hint)


def test_an_image_classifier_of_such_a_family_sees_images_of_its_size(tmp_path: Path) -> None:
    given = {"model_type": "clip", "vision_config": TOWER}
    model, batch = configured(tmp_path, given, "CLIPForImageClassification").build()
    assert batch["pixel_values"].shape == (2, 3, 32, 32)
    assert type(model).__name__ == "CLIPForImageClassification"


def test_the_text_of_such_a_family_is_sized_by_its_own_configuration(tmp_path: Path) -> None:
    text = {**TOWER, "model_type": "gemma3_text", "head_dim": 8, "num_key_value_heads": 2}
    model, batch = configured(tmp_path, text).build()
    assert type(model).__name__ == "Gemma3ForCausalLM" and batch["input_ids"].shape == (2, 8)


def test_a_model_type_that_transformers_does_not_have_is_named(tmp_path: Path) -> None:
    with pytest.raises(ss.InputError, match="has no model type 'their_own'") as caught:
        configured(tmp_path, {"model_type": "their_own"}).build()
    assert "package.module:factory" in str(caught.value.hint)


def test_a_timm_model(vision: str) -> None:
    try:
        import timm  # noqa: F401
    except ImportError:
        with pytest.raises(ss.InputError, match="timm"):
            ss.will_it_fit("timm:vit_tiny_patch16_224", "8 GB")
    else:
        assert ss.will_it_fit("timm:vit_tiny_patch16_224", "8 GB", batch=2).fits
        with pytest.raises(ss.InputError, match="timm has no model"):
            ss.will_it_fit("timm:nothing", "8 GB")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((torch.nn.Linear(2, 2), "8 GB"), "named by text, got a Linear"),
        (("hf:somewhere", "8 GB", {"tokens": "many"}), "tokens cannot be 'many'"),
        (("hf:somewhere", "8 GB", {"lora": 16}), "lora cannot be 16"),
    ],
)
def test_arguments_of_another_type_are_one_line(given: Any, told: str) -> None:
    model, budget, *how = given
    with pytest.raises(ss.InputError, match=told):
        ss.will_it_fit(model, budget, **dict(*how))
