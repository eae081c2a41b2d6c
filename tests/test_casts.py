"""param_dtype: what is cast where, what stays as it is, and what is refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import zero_shard
from zero_shard.config import ParamDtypes, ZeroConfig, load_config

_BF16, _F16, _F32, _F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
Pair = namedtuple("Pair", "first second")


def shard(model: nn.Module, param_dtype: Any = "bfloat16", **config: Any) -> zero_shard.AdamW:
    config = {"param_dtype": param_dtype, **config}
    return zero_shard.AdamW(model.parameters(), module=model, config=config)


# --- the setting ---


def test_a_dtype_stays_one_and_a_mapping_becomes_a_record() -> None:
    for given in (_BF16, "bf16", "bfloat16"):
        config = ZeroConfig(param_dtype=given)
        assert config.param_dtype == _BF16
        assert config.param_dtypes == ParamDtypes(params=_BF16, norms=_F32, outputs=None, buffers=None)
    config = load_config({"param_dtype": {"params": "fp16", "outputs": "float32"}})
    assert config.param_dtypes == config.param_dtype == ParamDtypes(params=_F16, outputs=_F32)
    assert len({config, config.replace(stage=2), ZeroConfig(param_dtype=_BF16)}) == 2
    assert "float16" in repr(config)
    assert ZeroConfig().param_dtypes is None


def test_a_mapping_can_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "zero.toml"
    path.write_text('[zero]\nstage = 1\nparam_dtype = {params = "bf16", norms = "bf16"}\n')
    assert load_config(path).param_dtype == ParamDtypes(params=_BF16, norms=_BF16)


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        ({"params": "bf16", "output": "fp32"}, ValueError, "unknown key 'output'.*'fp32'.*did you mean 'outputs'"),
        ({"params": "bf16", "q": 1}, ValueError, "unknown key 'q'.*params, norms, outputs, buffers"),
        ({"norms": "bf16"}, ValueError, "needs the key 'params'"),
        ({"params": "float32"}, ValueError, "param_dtype.params must be one of bfloat16, float16, got torch.float32"),
        ({"params": "bf16", "norms": "fp16"}, ValueError, "param_dtype.norms must be one of float32, bfloat16"),
        ({"params": None}, TypeError, "param_dtype.params"),
        ({"params": "bf16", "outputs": 3}, TypeError, "param_dtype.outputs.*3"),
        ({"params": "bf16", "buffers": "float64"}, ValueError, "param_dtype.buffers"),
    ],
)
def test_a_bad_mapping_is_refused_by_name(value: Any, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        load_config({"param_dtype": value})


def test_the_model_is_needed_and_must_be_float32() -> None:
    model = nn.Linear(3, 3)
    with pytest.raises(ValueError, match=r"param_dtype needs the model.*module=model"):
        zero_shard.AdamW(model.parameters(), config={"param_dtype": "bf16"})
    with pytest.raises(ValueError, match=r"parameter weight has dtype torch.float64.*module\.float\(\)"):
        shard(nn.Linear(3, 3).double())
    with pytest.raises(ValueError, match=r"parameter weight has dtype torch.float16"):
        shard(nn.Linear(3, 3).half(), "bf16")
    with pytest.raises(ValueError, match=r"weight has dtype torch.float16.*stochastic"):
        shard(model, "fp16", master="stochastic")
    assert model.weight.dtype == _F32, "nothing has been changed"


def test_a_model_of_16_bits_is_left_alone() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)).bfloat16()
    shard(model)
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_hooks
    assert {param.dtype for param in model.parameters()} == {_BF16}
    assert zero_shard.full_state_dict(model)["0.weight"].dtype == _BF16


# --- inputs and outputs ---


class Probe(nn.Module):
    """Keeps what it is given, and owns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return {"y": self.weight * 2, "ids": torch.arange(3), "more": [Pair(self.weight, "text")]}


def test_inputs_are_cast_however_nested() -> None:
    model = Probe()
    shard(model)
    x, ids = torch.ones(3), torch.arange(3)
    packed = pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    model(x, x, [x.double(), (ids, "text", 2.0, None)], packed, mask=x, pairs={"a": Pair(x.half(), ids)})
    first, second, nested, sequence = model.args
    assert first.dtype == _BF16 and first is second is model.kwargs["mask"], "one argument stays one"
    assert nested[0].dtype == _BF16 and nested[1][0] is ids and nested[1][1:] == ("text", 2.0, None)
    assert isinstance(sequence, PackedSequence) and sequence.data.dtype == _BF16
    pair = model.kwargs["pairs"]["a"]
    assert isinstance(pair, Pair) and pair.first.dtype == _BF16 and pair.second is ids
    kept: dict[str, Any] = {"seen": [torch.ones(3, dtype=_BF16)], "more": ids}
    model(kept, x, into=kept)
    assert model.args[1].dtype == _BF16
    assert model.args[0] is kept is model.kwargs["into"], "what holds nothing to cast may be written to"


@pytest.mark.parametrize("outputs", [None, _F32, _F64])
def test_outputs_are_cast_when_asked(outputs: torch.dtype | None) -> None:
    model = nn.Sequential(Probe())
    shard(model, {"params": _BF16, "outputs": outputs})
    output = model(torch.ones(3))
    assert output["y"].dtype == output["more"][0].first.dtype == (outputs or _BF16)
    assert output["ids"].dtype == torch.int64 and output["more"][0].second == "text"
    assert model[0](torch.ones(3))["y"].dtype == _BF16, "only those of the model"


class Model(nn.Module):
    """Enters itself by another method, adds a float32 buffer on the way, and owns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(4))
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)])

    def encode(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.offset
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


def test_any_way_into_the_model_is_cast() -> None:
    model = Model()
    shard(model)
    for x in (torch.ones(2, 4), torch.ones(2, 4, dtype=_F64), torch.ones(2, 4, dtype=_BF16)):
        assert model(x).dtype == model.encode(x).dtype == _F32, "the buffer is float32"
        assert model.layers[2](x).dtype == model.layers[1](x).dtype == _BF16
    x = torch.ones(2, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == _F32
    assert model.layers[0].weight.grad.dtype == _BF16 and model.layers[1].weight.grad.dtype == _F32


# --- norms and buffers ---


class ScaleNorm(nn.Module):
    """A norm of one's own, as language models have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return self.weight * x


class PreNorm(nn.Module):
    """No norm: it has one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fn = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.seen = x.dtype
        return self.fn(self.norm(x))


def _norms() -> list[nn.Module]:
    norms: list[nn.Module] = [nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), nn.BatchNorm1d(4), ScaleNorm()]
    return [*norms, nn.BatchNorm1d(4, affine=False), nn.LocalResponseNorm(2)]


def test_norms_stay_as_they_are_unless_asked() -> None:
    for norm in _norms():
        model = nn.Sequential(nn.Linear(4, 4), norm)
        shard(model)
        assert model[0].weight.dtype == _BF16
        assert {each.dtype for each in norm.parameters()} <= {_F32}, norm
        assert {each.dtype for each in norm.buffers()} <= {_F32, torch.int64}, norm
        x = torch.ones(3, 4, 5) if isinstance(norm, nn.LocalResponseNorm) else torch.ones(3, 4)
        assert norm(x.bfloat16()).dtype == norm(x).dtype == _BF16, norm
    assert model[0].weight.dtype == _BF16
    own = nn.Sequential(nn.Linear(4, 4), ScaleNorm(), PreNorm())
    shard(own)
    own(torch.ones(2, 4))
    assert own[1].seen == _F32 and own[2].seen == _BF16
    assert own[2].norm.weight.dtype == _F32 and own[2].fn.weight.dtype == _BF16


def test_norms_and_buffers_are_cast_when_asked() -> None:
    model = nn.Sequential(nn.Linear(4, 4), *_norms()[:5], Model())
    shard(model, {"params": "bf16", "norms": "bf16", "buffers": "bf16"})
    assert {each.dtype for each in model.parameters()} == {_BF16}
    assert {each.dtype for each in model.buffers()} == {_BF16, torch.int64}
    assert model(torch.ones(3, 4)).dtype == _BF16
    model = nn.Sequential(nn.BatchNorm1d(4), Model())
    shard(model, {"params": "bf16", "buffers": "bf16"})
    assert model[0].running_mean.dtype == _F32, "of a norm that stays float32"
    assert model[1].offset.dtype == _BF16


# --- torch's own modules, training and not ---


def _transformer() -> tuple[nn.Module, tuple[Any, ...]]:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (torch.randn(2, 3, 8),)


def _attention() -> tuple[nn.Module, tuple[Any, ...]]:
    x = torch.randn(2, 3, 8)
    return nn.MultiheadAttention(8, 2, batch_first=True), (x, x, x, torch.zeros(2, 3), True, torch.zeros(3, 3))


def _convolution() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (torch.randn(2, 3, 8, 8),)


def _recurrent() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.LSTM(4, 6), (pack_padded_sequence(torch.randn(3, 2, 4), torch.tensor([3, 2])),)


def _weight_norm() -> tuple[nn.Module, tuple[Any, ...]]:
    return nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (torch.randn(2, 4),)


def _first(value: Any) -> Tensor:
    while not isinstance(value, Tensor):
        value = value[0]
    return value


@pytest.mark.parametrize("make", [_transformer, _attention, _convolution, _recurrent, _weight_norm])
def test_modules_of_torch_train_and_evaluate(make: Any) -> None:
    torch.manual_seed(0)
    model, args = make()
    plain = copy.deepcopy(model)
    optimizer = shard(model)
    for is_training in (True, False):
        model.train(is_training), plain.train(is_training)
        with torch.set_grad_enabled(is_training):
            got, want = _first(model(*args)), _first(plain(*args))
        assert got.dtype == _BF16
        torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)
    _first(model.train()(*args)).float().sum().backward()
    optimizer.step()


def test_gradients_that_were_there_before_are_cast() -> None:
    model = nn.Linear(4, 4)
    model(torch.ones(1, 4)).sum().backward()
    optimizer = shard(model)
    assert model.weight.grad is not None and model.weight.grad.dtype == _BF16
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def test_two_optimizers_share_a_model() -> None:
    """Each casts and trains what it is given."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    before = copy.deepcopy(model.state_dict())
    first = zero_shard.AdamW(model[0].parameters(), module=model, config={"param_dtype": "bf16"})
    assert model[0].weight.dtype == _BF16 and model[1].weight.dtype == _F32
    assert model(torch.ones(2, 4)).dtype == _F32
    second = zero_shard.AdamW(model[1].parameters(), module=model, config={"param_dtype": "bf16"})
    for name, value in zero_shard.full_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    for optimizer, name in ((first, "0.weight"), (second, "1.weight")):
        before = zero_shard.full_state_dict(model)
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        model.zero_grad()
        after = zero_shard.full_state_dict(model)
        assert {key.split(".")[0] for key in after if not torch.equal(after[key], before[key])} == {name[0]}


# --- hooks ---


def _num_hooks(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_another_optimizer_finds_the_hooks() -> None:
    model = Model()
    shard(model)
    num_hooks = _num_hooks(model)
    for _ in range(3):
        shard(model)
        assert _num_hooks(model) == num_hooks
    assert all(len(module._forward_pre_hooks_with_kwargs) < 2 for module in model.modules())
    model.float()
    assert model(torch.ones(2, 4)).dtype == _F32, "works, though its parameters are wide again"
    shard(model, {"params": _F16, "outputs": _F64})
    assert model.layers[0](torch.ones(2, 4)).dtype == _F16
    assert model(torch.ones(2, 4)).dtype == _F64
    shard(model.float())
    assert _num_hooks(model) == num_hooks + 1
    assert model(torch.ones(2, 4)).dtype == _F32, "no longer cast"


def test_copies_of_the_model_work_and_belong_to_nobody() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = shard(model)
    before = zero_shard.full_state_dict(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(buffer, weights_only=False)]
    for each in copies:
        assert torch.equal(each(torch.ones(2, 4)), model(torch.ones(2, 4)))
        each.load_state_dict({name: torch.full_like(value, 0.3) for name, value in before.items()})
    for name, value in zero_shard.full_state_dict(model).items():
        assert torch.equal(value, before[name]), name
    del optimizer
    model.load_state_dict(before)  # the masters are gone, and nobody minds
    assert model(torch.ones(2, 4)).dtype == _F32


@pytest.mark.filterwarnings("default")
def test_a_compiled_model_gives_the_same() -> None:
    torch.manual_seed(0)
    model = Model()
    optimizer = shard(model)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(2, 4)), model(torch.ones(2, 4)))
    compiled(torch.ones(2, 4)).sum().backward()
    optimizer.step()
