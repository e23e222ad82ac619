"""Models with adapters of PEFT, the real one, in Hugging Face's `Trainer` with `RelayCallback`."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import torchrelay as tr
from tests.support.framework_jobs import losses_of
from torchrelay.errors import MismatchError, UsageError

transformers = pytest.importorskip("transformers", reason="transformers is not installed")
peft = pytest.importorskip("peft", reason="peft is not installed")

from tests.integrations import trainer_job as job  # noqa: E402
from tests.integrations.test_transformers import At, trained  # noqa: E402
from torchrelay.integrations.transformers import RelayCallback  # noqa: E402


def base(folder: Path) -> Any:
    """A model that has been downloaded, so to say."""
    job.model().save_pretrained(folder / "base")
    return transformers.GPT2LMHeadModel.from_pretrained(folder / "base")


def config(**options: Any) -> Any:
    return peft.LoraConfig(
        **{"r": 2, "lora_dropout": 0.1, "target_modules": ["c_attn"], "fan_in_fan_out": True},
        **options,
    )


def adapted(folder: Path, **options: Any) -> Any:
    torch.manual_seed(2)
    model = peft.get_peft_model(base(folder), config(task_type="CAUSAL_LM", **options))
    return model


def scores(model: Any) -> torch.Tensor:
    model.eval()
    with torch.no_grad():
        found: torch.Tensor = model(job.Texts(2).rows).logits
    return found


def test_the_export_is_a_directory_of_adapters(tmp_path: Path) -> None:
    trainer, relay = trained(tmp_path, "x", model=adapted(tmp_path, modules_to_save=["lm_head"]))
    relay.export(tmp_path / "model")
    assert not (tmp_path / "model" / "config.json").exists()
    with_base = peft.PeftModel.from_pretrained(base(tmp_path), tmp_path / "model")
    opened = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = scores(trainer.model)
    assert not torch.equal(expected, scores(base(tmp_path))), "it was trained"
    assert torch.equal(scores(with_base), expected)
    assert torch.equal(scores(opened), expected)


def test_the_export_is_of_its_step_not_of_the_model_at_hand(tmp_path: Path) -> None:
    trainer, relay = trained(tmp_path, "x", model=adapted(tmp_path), keep=10)
    relay.export(tmp_path / "early", step=2)
    relay.export(tmp_path / "late")
    early, late = (
        peft.PeftModel.from_pretrained(base(tmp_path), tmp_path / name)
        for name in ("early", "late")
    )
    assert torch.equal(scores(late), scores(trainer.model))
    assert not torch.equal(scores(early), scores(late))


def test_several_adapters(tmp_path: Path) -> None:
    model = adapted(tmp_path)
    model.add_adapter("second", config())
    trainer, relay = trained(tmp_path, "x", model=model)
    relay.export(tmp_path / "model")
    opened = peft.PeftModel.from_pretrained(base(tmp_path), tmp_path / "model")
    opened.load_adapter(tmp_path / "model" / "second", "second")
    ours, theirs = trainer.model.state_dict(), opened.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def test_adapters_that_transformers_added(tmp_path: Path) -> None:
    model = base(tmp_path)
    torch.manual_seed(2)
    model.add_adapter(config())
    trainer, relay = trained(tmp_path, "x", model=model)
    relay.export(tmp_path / "model")
    opened = peft.PeftModel.from_pretrained(base(tmp_path), tmp_path / "model")
    assert torch.equal(scores(opened), scores(trainer.model))


def exporter(folder: Path, model: Any) -> RelayCallback:
    """A callback whose trainer has this model, with a step of another one."""
    with tr.Checkpointer(folder / "steps") as checkpointer:
        checkpointer.save(1, {"model": adapted(folder)})
    relay = RelayCallback(folder / "steps", every=1, timeout=60)
    relay._model = model
    return relay


def test_a_model_whose_adapters_were_merged_is_refused(tmp_path: Path) -> None:
    relay = exporter(tmp_path, adapted(tmp_path).merge_and_unload())
    with pytest.raises(MismatchError, match="different weights"):
        relay.export(tmp_path / "model")


def test_a_mixed_model_is_refused(tmp_path: Path) -> None:
    relay = exporter(tmp_path, peft.get_peft_model(base(tmp_path), config(), mixed=True))
    with pytest.raises(UsageError, match="PeftMixedModel"):
        relay.export(tmp_path / "model")


def test_a_quantized_model_is_refused(tmp_path: Path) -> None:
    """It would write what it has now. A stand-in: quantizers need packages of their own."""
    model = base(tmp_path)
    model.hf_quantizer = object()
    with pytest.raises(UsageError, match="quantized"):
        exporter(tmp_path, model).export(tmp_path / "model")


@pytest.mark.parametrize("added", ["by peft", "by transformers"])
def test_a_plain_export_refuses_adapters(tmp_path: Path, added: str) -> None:
    model = adapted(tmp_path)
    if added == "by transformers":
        model = base(tmp_path)
        model.add_adapter(config())
    with tr.Checkpointer(tmp_path / "steps") as checkpointer:
        checkpointer.save(1, {"model": model})
        with pytest.raises(MismatchError, match="adapters of PEFT"):
            checkpointer.export_hf(tmp_path / "model")
    assert not (tmp_path / "model").exists()


@pytest.mark.slow
def test_a_job_with_adapters_continues_exactly(tmp_path: Path) -> None:
    trained(tmp_path / "calm", "whole", model=adapted(tmp_path))
    stop = At(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    trained(tmp_path / "a", "first", stop, model=adapted(tmp_path))
    trained(tmp_path / "a", "second", model=adapted(tmp_path))
    second = losses_of(tmp_path / "a", "second")
    assert second == losses_of(tmp_path / "calm", "whole")[-len(second) :] and len(second) < 15
