"""A step as one CUDA graph against the same step launched kernel by kernel, and where it is refused."""

from __future__ import annotations

import pytest
import yaml

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from powerinfer_toolkit.convert.relufy import cli, graphed  # noqa: E402
from powerinfer_toolkit.convert.relufy.settings import RelufySettings, check  # noqa: E402
from powerinfer_toolkit.errors import PiError, UsageError  # noqa: E402
from relufy import tiny  # noqa: E402


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_is_an_error(tmp_path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tiny.run_settings(tmp_path, cuda_graph=True)))
    assert cli.main([str(config)]) == 1
    said = capsys.readouterr().err
    assert "error: cuda_graph needs one process on a GPU, not 1 on cpu" in said
    assert "hint: set cuda_graph to false" in said


@pytest.mark.parametrize(
    "change", [{"gradient_accumulation_steps": 2}, {"attn_implementation": "eager"}]
)
def test_what_a_recording_cannot_hold_is_refused(change):
    with pytest.raises(UsageError, match="cuda_graph goes with"):
        check(RelufySettings("model", "out", cuda_graph=True, **change))


def test_a_window_shorter_than_a_block_is_refused():
    transformers = pytest.importorskip("transformers")
    config = transformers.MistralConfig(sliding_window=512)
    with pytest.raises(PiError, match="attends to 512 tokens, a block has 1024"):
        graphed.whole_block_attention(config, 1024)
    assert graphed.whole_block_attention(config, 512) == graphed.WHOLE_BLOCKS


def test_the_attention_without_a_mask_is_causal(tmp_path):
    from transformers import AutoModelForCausalLM

    tiny.write_model(tmp_path)
    ids = torch.arange(24)[None] % 11
    found = []
    for attention in ("sdpa", graphed.whole_block_attention(None, 24)):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
        found.append(model.eval()(ids).logits)
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")
def test_replays_make_the_gradients_of_single_launches(tmp_path):
    from transformers import AutoModelForCausalLM

    tiny.write_model(tmp_path)
    attention = graphed.whole_block_attention(None, 32)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation=attention).cuda()

    def compute(ids, weight):
        loss = model(ids, labels=ids).loss
        return {"loss": loss * (1 + weight), "plain": loss}

    batches = torch.randint(200, (4, 2, 32), generator=torch.Generator().manual_seed(0)).cuda()
    recorded = graphed.GraphedPass(compute, model, batches[0])
    for number, ids in enumerate(batches):
        parts = {name: part.clone() for name, part in recorded.run(ids, 0.5 * number).items()}
        gradients = [p.grad.clone() for p in model.parameters()]
        model.zero_grad(set_to_none=True)
        expected = compute(ids, torch.tensor(0.5 * number, device="cuda"))
        expected["loss"].backward()
        torch.testing.assert_close(parts, {k: v.detach() for k, v in expected.items()})
        # float32 sums in another order where atomics add: 1e-5 of the largest
        for gradient, parameter in zip(gradients, model.parameters(), strict=True):
            scale = parameter.grad.abs().max().item()
            torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-5 * scale)
        model.zero_grad(set_to_none=True)
