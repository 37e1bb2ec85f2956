"""Models of Hugging Face transformers, unmodified, randomly initialised: gradients of eager."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxpipe.errors import CaptureError, ModelError

os.environ.setdefault("HF_HUB_OFFLINE", "1")
hf: Any = pytest.importorskip("transformers", reason="needs transformers: pip install fxpipe[hf]")

ROWS, LENGTH = 5, 6
SIZES = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
Batch = dict[str, Tensor]


def tokens() -> Tensor:
    return torch.randint(3, 32, (ROWS, LENGTH))


def text(padded: bool = True) -> Batch:
    """Rows of different lengths, so that microbatches have different numbers of labels."""
    batch = {"input_ids": tokens(), "labels": tokens()}
    if padded:
        mask = torch.arange(LENGTH) < torch.tensor([[6], [3], [5], [2], [4]])
        batch |= {"attention_mask": mask.long()}
        batch["labels"][~mask] = -100
    return batch


def decoder(name: str, **settings: Any) -> nn.Module:
    sizes = SIZES | {"num_hidden_layers": 2, "num_key_value_heads": 1, "use_cache": False}
    config = getattr(hf, f"{name}Config")(**(sizes | settings))
    return getattr(hf, f"{name}ForCausalLM")(config)


def encoder(name: str, head: str, **settings: Any) -> nn.Module:
    sizes = SIZES | NO_DROPOUT | {"num_hidden_layers": 2}
    config = getattr(hf, f"{name}Config")(**(sizes | settings))
    return getattr(hf, f"{name}For{head}")(config)


def t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=32, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2, dropout_rate=0.0,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def images() -> Batch:
    labels = torch.tensor([1, 0, 3, 2, 1])
    return {"pixel_values": torch.randn(ROWS, 3, 16, 16), "labels": labels}


def vit() -> nn.Module:
    return encoder("ViT", "ImageClassification", image_size=16, patch_size=8, num_labels=4)


def prepared(model: nn.Module, experts: str | None = None) -> nn.Module:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    if experts is not None:
        model.set_experts_implementation(experts)
    return model.double().train()


def steps(model: nn.Module, stages: Any = 3, **options: Any) -> Callable[..., Any]:
    options = {"microbatches": 2, "schedule": "zb-h1", "lowering": "eager"} | options
    return torch.compile(model, backend="fxpipe", options={"stages": stages, **options})


def assert_equal_gradients(model: nn.Module, twin: nn.Module) -> None:
    """Relative to the largest gradient: some are zero but for rounding, a key's bias for one."""
    found = dict(model.named_parameters())
    gradients = {n: p.grad for n, p in twin.named_parameters() if p.grad is not None}
    scale = max(float(gradient.abs().max()) for gradient in gradients.values())
    assert scale > 1e-3
    for name, gradient in gradients.items():
        actual = found[name].grad
        assert actual is not None, name
        torch.testing.assert_close(
            actual, gradient, rtol=1e-10, atol=1e-12 * scale, msg=lambda m, n=name: f"{n}: {m}"
        )


def check(model: nn.Module, batch: Mapping[str, Tensor], stages: Any = 3, **options: Any) -> Any:
    """One step, and the same in eager: an output of the model's own type, equal gradients."""
    twin = copy.deepcopy(model)
    if hasattr(getattr(model, "config", None), "num_local_experts"):
        twin.set_experts_implementation("eager")  # grouped products of float64 are not in eager
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    actual, expected = steps(model, stages, **options)(**batch), twin(**batch)
    assert type(actual) is type(expected)
    # Some of these models compute their loss in float32 whatever their own type is.
    torch.testing.assert_close(actual.loss, expected.loss, rtol=2e-7, atol=0)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-10, atol=1e-12)
    actual.loss.backward()
    expected.loss.backward()
    assert_equal_gradients(model, twin)
    return actual


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], Any]] = {
    "llama": (lambda: decoder("Llama", num_hidden_layers=3), lambda: text(padded=False), 3),
    "llama, padded, by path": (lambda: decoder("Llama"), text, ["model.layers.1", "lm_head"]),
    "qwen3, tied": (
        lambda: decoder("Qwen3", head_dim=4, tie_word_embeddings=True), text, 3,
    ),
    "mixtral": (lambda: decoder("Mixtral", num_local_experts=4), text, 2),
    "bert": (lambda: encoder("Bert", "MaskedLM"), text, 3),
    "vit": (vit, images, 2),
    "t5": (t5, text, 2),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_eager(name: str) -> None:
    make, batch, stages = CASES[name]
    model = prepared(make())
    output = check(model, batch(), stages)
    assert isinstance(output, hf.utils.ModelOutput)


class OwnLoss(nn.Module):
    """Likelihood of the labels, which nothing but a gather reads."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        output = self.model(input_ids=input_ids)
        scores = F.log_softmax(output.logits, -1)
        output["loss"] = -scores.gather(-1, labels[..., None]).mean()
        return output


def gpt2() -> nn.Module:
    config = hf.GPT2Config(
        vocab_size=32, n_embd=8, n_layer=2, n_head=2, n_positions=8, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def test_gpt2_trains_with_a_loss_of_the_users_own() -> None:
    check(OwnLoss(prepared(gpt2())), text(padded=False), 2)


def test_gpt2s_own_loss_breaks_the_graph_at_a_named_line() -> None:
    with pytest.raises(CaptureError, match=r"it breaks at .*modeling_gpt2.py:\d+"):
        steps(prepared(gpt2()))(**text(padded=False))


def test_loss_of_expert_balance_is_refused_with_its_line() -> None:
    model = prepared(decoder("Mixtral", output_router_logits=True))
    with pytest.raises((CaptureError, ModelError), match=r"(mixtral|capturing).py:\d+"):
        steps(model, 2)(**text())


def test_contrastive_loss_needs_a_word_of_the_user() -> None:
    small = SIZES | {"num_hidden_layers": 1}
    model = prepared(
        hf.CLIPModel(
            hf.CLIPConfig(
                text_config=small | {"max_position_embeddings": 8, "eos_token_id": 2},
                vision_config=small | {"image_size": 16, "patch_size": 8},
                projection_dim=4,
            )
        )
    )
    batch = {"input_ids": tokens(), "pixel_values": torch.randn(ROWS, 3, 16, 16).double()}
    with pytest.raises(ModelError, match=r"mixes microbatches, at .*modeling_clip.py:\d+"):
        steps(model, 2)(**batch, return_loss=True)
