"""Checkpoints that DeepSpeed wrote (tests/data/make_deepspeed.py) become an import, without DeepSpeed.

Every element is compared. Reading runs no code of the file: hostile pickles come back as inert stand-ins.
"""

from __future__ import annotations

import codecs
import functools
import os
import pickle
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from zero_shard.interchange import Imported, read_deepspeed
from zero_shard.interchange.inert_pickle import Inert, load_inert

ARCHIVE = Path(__file__).parent / "data" / "deepspeed.tar.xz"
CASES = [
    "stage1_float32",
    "stage1_bfloat16",
    "stage1_bfloat16_float32_sums",
    "stage2_float32",
    "stage2_bfloat16",
    "stage3_float32",
    "stage3_bfloat16",
]


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints, not to be changed."""
    path = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return path


@pytest.fixture
def copied(written: Path, tmp_path: Path) -> Callable[[str], Path]:
    """Copies one checkpoint and returns its directory with the files."""

    def copy(case: str) -> Path:
        shutil.copytree(written / case, tmp_path / case)
        return tmp_path / case / "global_step3"

    return copy


def plain(value: Any) -> Any:
    """Replace stand-ins by what torch.save can write, and mapped tensors by copies."""
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Inert):
        return value.arguments[0] if value.arguments else None
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain(each) for each in value]
    return value


def rewrite(path: Path, change: Callable[[Any], object]) -> None:
    """Change what a file holds."""
    content = plain(load_inert(path))
    change(content)
    torch.save(content, path)


@pytest.mark.parametrize("case", CASES)
def test_every_weight_and_moment_is_what_deepspeed_says(case: str, written: Path) -> None:
    expected = torch.load(written / case / "expected.pt", weights_only=True)
    got = read_deepspeed(written / case)
    assert set(got.tensors) == set(expected)
    assert any(float(value.abs().max()) > 0 for key, value in expected.items() if key.endswith("exp_avg_sq"))
    for key, value in expected.items():
        lazy, read = got.tensors[key], got.tensors[key].read()
        assert (lazy.shape, lazy.dtype) == (value.shape, value.dtype) == (read.shape, read.dtype), key
        assert torch.equal(read, value), key
    assert got.steps == dict.fromkeys(["embedding.weight", "body.weight", "body.bias", "scale"], 3.0)
    assert got.aliases == {"head.weight": "embedding.weight"}
    assert "deepspeed" not in sys.modules


@pytest.mark.parametrize("case", CASES)
def test_groups_are_those_of_torch(case: str, written: Path) -> None:
    got = read_deepspeed(written / case)
    settings = {"lr": 5e-3, "weight_decay": 0.1, "initial_lr": 1e-2}
    others = {"lr": 1.5e-3, "weight_decay": 0.0, "betas": (0.8, 0.95), "kind": "others", "initial_lr": 3e-3}
    if case == "stage2_bfloat16":  # an elastic checkpoint has none
        settings, others = {}, {}
        assert any("elastic checkpoint has no settings" in note for note in got.notes)
    base = torch.optim.AdamW([nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"][0]
    names = [["body.weight", "embedding.weight"], ["body.bias", "scale"]]
    for group, expected, own in zip(got.param_groups, (settings, others), names, strict=True):
        assert {**group, "params": sorted(group["params"])} == {**base, **expected, "params": own}


def test_what_is_left_out_is_said(written: Path) -> None:
    notes = "\n".join(read_deepspeed(written / "stage3_float32").notes)
    assert "client state is dropped: epoch, thing;" in notes
    assert "the state of lr_scheduler is dropped" in notes
    assert "global_steps=3, global_samples=48" in notes
    assert "in no group: frozen.bias, frozen.weight" in notes


def test_one_of_several_checkpoints(copied: Callable[[str], Path]) -> None:
    directory = copied("stage3_float32")
    shutil.copytree(directory, directory.with_name("older"))
    (directory / "zero_pp_rank_1_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(FileNotFoundError, match="global_step3/zero_pp_rank_1_mp_rank_00_model_states"):
        read_deepspeed(directory.parent)
    assert len(read_deepspeed(directory.parent, tag="older").tensors) == 21
    assert len(read_deepspeed(directory.with_name("older")).tensors) == 21


def _model_keys(got: Imported) -> set[str]:
    return {key for key in got.tensors if key.startswith("model.")}


@pytest.mark.parametrize("case", ["stage1_float32", "stage3_bfloat16"])
def test_before_the_first_step_there_is_no_state(case: str, copied: Callable[[str], Path]) -> None:
    directory = copied(case)

    def forget(content: Any) -> None:
        state = content["optimizer_state_dict"]
        (state.get("base_optimizer_state") or state["optimizer_state_dict"])["state"] = {}

    for path in directory.glob("*_optim_states.pt"):
        rewrite(path, forget)
    got = read_deepspeed(directory)
    assert got.steps == {} and set(got.tensors) == _model_keys(got)


def test_step_counts_of_groups(copied: Callable[[str], Path]) -> None:
    """DeepSpeed's FusedAdam keeps them there, and has fewer settings."""
    directory = copied("stage1_float32")

    def move(content: Any) -> None:
        base = content["optimizer_state_dict"]["base_optimizer_state"]
        for number, group in enumerate(base["param_groups"]):
            del base["state"][number]["step"], group["amsgrad"], group["maximize"]
            group |= {"step": 3, "bias_correction": True}

    for path in directory.glob("*_optim_states.pt"):
        rewrite(path, move)
    got = read_deepspeed(directory)
    assert set(got.steps.values()) == {3.0} and len(got.steps) == 4
    assert all("step" not in group and group["amsgrad"] is False for group in got.param_groups)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the memory is read from /proc")
def test_memory_stays_at_one_parameter(tmp_path: Path, written: Path) -> None:
    """Three vectors of 32 MiB are mapped, and each of the parameters of 8 MiB is read alone."""
    numel, name = 2**21, "zero_pp_rank_0_mp_rank_00_optim_states.pt"
    flat = {kind: torch.full((4 * numel,), float(number)) for number, kind in enumerate(("exp_avg", "exp_avg_sq"))}
    state = {"state": {0: {"step": torch.tensor(1.0), **flat}}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    shapes = [{f"p{number}": torch.Size([numel]) for number in range(4)}]
    zero = {"zero_stage": 1, "partition_count": [1], "base_optimizer_state": state}
    zero["single_partition_of_fp32_groups"] = [torch.ones(4 * numel)]
    torch.save({"optimizer_state_dict": zero}, tmp_path / name)
    torch.save({"module": {}, "param_shapes": shapes, "shared_params": {}}, tmp_path / "mp_rank_00_model_states.pt")
    read_deepspeed(written / "stage1_float32")
    before_nbytes = _anonymous_nbytes()
    got = read_deepspeed(tmp_path)
    assert _anonymous_nbytes() - before_nbytes < 12 * 2**20, "of 96 MiB, with a MiB or so of checksums"
    for key, lazy in got.tensors.items():
        value = lazy.read()
        assert value.untyped_storage().nbytes() == value.nbytes <= 4 * numel, key
        assert value.eq(value.view(-1)[0]).all(), key
        assert value.data_ptr() not in [part.data_ptr() for part in lazy.parts], "it is no alias of the file"


def _anonymous_nbytes() -> int:
    """What this process holds beside mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))


# --- what is refused ---


def _first(directory: Path, pattern: str = "*rank_0_*_optim_states.pt") -> Path:
    return next(iter(directory.glob(pattern)))


def _flip(path: Path) -> None:
    """Change one bit of a tensor."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        largest = max(
            (each for each in archive.infolist() if "/data/" in each.filename), key=lambda each: each.file_size
        )
    start = largest.header_offset + 30 + int.from_bytes(content[largest.header_offset + 26 :][:2], "little")
    start += int.from_bytes(content[largest.header_offset + 28 :][:2], "little")
    content[start + 2] ^= 1
    path.write_bytes(content)


def _set(key: str, value: Any) -> Callable[[Any], object]:
    return lambda content: content["optimizer_state_dict"].__setitem__(key, value)


def _bias_correction(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"][1]["bias_correction"] = False


def _other_optimizer(content: Any) -> None:
    entry = content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]
    entry["momentum_buffer"] = entry.pop("exp_avg")
    del entry["exp_avg_sq"]


def _other_step(content: Any) -> None:
    content["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] = torch.tensor(4.0)


def _short_moment(content: Any) -> None:
    entry = content["optimizer_state_dict"]["base_optimizer_state"]["state"][0]
    entry["exp_avg"] = entry["exp_avg"][:-4]


def _short_weights(content: Any) -> None:
    masters = content["optimizer_state_dict"]["single_partition_of_fp32_groups"]
    masters[0] = masters[0][:-1]


def _damage(kind: str, directory: Path) -> None:
    optimizer, second = _first(directory), _first(directory, "*rank_1_*_optim_states.pt")
    model = directory / "mp_rank_00_model_states.pt"
    match kind:
        case "a rank's file is missing":
            second.unlink()
        case "the first rank's file is missing":
            optimizer.unlink()
        case "no model":
            model.unlink()
        case "cut":
            second.write_bytes(second.read_bytes()[:-100])
        case "empty":
            second.write_bytes(b"")
        case "bit":
            _flip(second)
        case "model bit":
            _flip(model)
        case "too many ranks":
            shutil.copy(second, second.with_name(second.name.replace("rank_1", "rank_2")))
        case "twice":
            shutil.copy(second, second.with_name("bf16_" + second.name))
        case "unknown stage":
            rewrite(optimizer, _set("zero_stage", 4))
        case "two stages":
            rewrite(second, _set("zero_stage", 2))
        case "several counts":
            rewrite(optimizer, _set("partition_count", [2, 1]))
        case "no masters":
            rewrite(second, _set("single_partition_of_fp32_groups", None))
        case "no state":
            rewrite(optimizer, lambda content: content["optimizer_state_dict"].pop("base_optimizer_state"))
        case "other optimizer":
            rewrite(optimizer, _other_optimizer)
        case "other step":
            rewrite(second, _other_step)
        case "short moment":
            rewrite(second, _short_moment)
        case "short weights":
            rewrite(optimizer, _short_weights)
        case "no bias correction":
            rewrite(optimizer, _bias_correction)
        case "no shapes":
            rewrite(model, lambda content: content.pop("param_shapes"))
        case "shapes of another model":
            rewrite(model, lambda content: content["param_shapes"][0].popitem())
        case "tensor parallel":
            shutil.copy(model, model.with_name("mp_rank_01_model_states.pt"))
        case "experts":
            shutil.copy(optimizer, directory / "expp_rank_0_mp_rank_00_optim_states.pt")
        case "universal":
            (directory / "zero").mkdir()
        case _:
            raise AssertionError(kind)


REFUSED = [
    ("a rank's file is missing", "zero_pp_rank_1_mp_rank_00_optim_states.pt is missing: 2 ranks wrote"),
    ("the first rank's file is missing", "zero_pp_rank_0_mp_rank_00_optim_states.pt is missing"),
    ("no model", "mp_rank_00_model_states.pt is missing; copy"),
    ("cut", "zero_pp_rank_1_.*cannot be read.*damaged.*copy it again"),
    ("empty", "zero_pp_rank_1_.*cannot be read.*damaged.*copy it again"),
    ("bit", "zero_pp_rank_1_.*checksum"),
    ("model bit", "mp_rank_00_model_states.pt.*checksum"),
    ("too many ranks", "zero_pp_rank_2_.*does not belong here: 2 ranks wrote"),
    ("twice", "are both of rank 1; remove the older"),
    ("unknown stage", "zero_pp_rank_0_.*ZeRO stage 4, which is not known; expected 1, 2 or 3"),
    ("two stages", "zero_pp_rank_1_.* is of stage 2 and 2 ranks"),
    ("several counts", r"zero_pp_rank_0_.*partition_count=\[2, 1\]"),
    ("no masters", "zero_pp_rank_1_.*no single_partition_of_fp32_groups"),
    ("no state", "not laid out as DeepSpeed does it.*base_optimizer_state"),
    (
        "other optimizer",
        "zero_pp_rank_0_.*group 1 has state .*momentum_buffer.*expected exp_avg and exp_avg_sq of Adam",
    ),
    ("other step", r"zero_pp_rank_1_.*group 1 has taken 4.0 steps, on rank 0 3.0"),
    ("short moment", "zero_pp_rank_1_.*exp_avg of group 0 has .* elements"),
    ("short weights", "group 0 has 59 elements, its parameters need 60"),
    ("no bias correction", "group 1 was trained with bias_correction=False"),
    ("no shapes", "mp_rank_00_model_states.pt has no param_shapes"),
    ("shapes of another model", "group 0 has 60 elements, its parameters need 35"),
    ("tensor parallel", "mp_rank_01_model_states.pt belongs to tensor parallelism"),
    ("experts", "expp_rank_0_.* belongs to a mixture of experts"),
    ("universal", "zero belongs to DeepSpeed's universal format"),
]


@pytest.mark.parametrize(("kind", "text"), REFUSED)
def test_what_is_damaged_or_unknown_is_refused_by_name(kind: str, text: str, copied: Callable[[str], Path]) -> None:
    directory = copied("stage1_float32")
    _damage(kind, directory)
    error = FileNotFoundError if "missing" in kind or kind == "no model" else ValueError
    with pytest.raises(error, match=text):
        read_deepspeed(directory.parent)


def test_checksums_can_be_left_unread(copied: Callable[[str], Path]) -> None:
    directory = copied("stage1_float32")
    _damage("bit", directory)
    assert len(read_deepspeed(directory, verify=False).tensors) == 22


@pytest.mark.parametrize("latest", ["..", "../elsewhere", "/etc", "", "a\0b", "global_step3/.."])
def test_latest_does_not_lead_elsewhere(latest: str, copied: Callable[[str], Path]) -> None:
    directory = copied("stage1_float32")
    shutil.copytree(directory, directory.parent.parent / "elsewhere")
    (directory.parent / "latest").write_text(latest)
    with pytest.raises(ValueError, match=r"latest names .*, expected a directory beside it"):
        read_deepspeed(directory.parent)


def test_names_that_lead_nowhere(copied: Callable[[str], Path], tmp_path: Path) -> None:
    directory = copied("stage1_float32")
    with pytest.raises(FileNotFoundError, match="global_step4 is missing; name another"):
        read_deepspeed(directory.parent, tag="global_step4")
    (directory.parent / "latest").unlink()
    with pytest.raises(FileNotFoundError, match="latest is missing; name the checkpoint with tag="):
        read_deepspeed(directory.parent)
    with pytest.raises(FileNotFoundError, match="nowhere is no directory"):
        read_deepspeed(tmp_path / "nowhere")


# --- pickles that mean harm ---


class Call:
    """Is pickled as a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.function, self.arguments = function, arguments

    def __reduce__(self) -> tuple[Any, ...]:
        return (self.function, self.arguments)


def _write_pickle(path: Path, data: bytes) -> None:
    """Write a file of torch.save with a pickle of our own."""
    torch.save({}, path)
    with zipfile.ZipFile(path) as archive:
        members = {each: archive.read(each) for each in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, value in members.items():
            archive.writestr(name, data if name.endswith("/data.pkl") else value)


def test_a_file_runs_no_code(copied: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    (tmp_path / "foreign_module.py").write_text(f"open({str(trace)!r}, 'w')\nclass Thing: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    code = f"open({str(trace)!r}, 'w')"
    calls = [
        Call(os.system, f"touch {trace}"),
        Call(subprocess.Popen, ["touch", str(trace)]),
        Call(exec, code),
        Call(open, str(trace), "w"),
        Call(functools.partial, exec, code),
        Call(torch.storage._load_from_bytes, pickle.dumps(Call(exec, code))),
    ]
    directory = copied("stage1_float32")
    path = _first(directory)
    rewrite(path, lambda content: content.update(calls=calls))
    assert len(read_deepspeed(directory).tensors) == 22
    found = load_inert(path)["calls"]
    assert all(isinstance(each, Inert) for each in found)
    assert [each.origin.rpartition(".")[2] for each in found] == [
        *("system", "Popen", "exec", "open", "partial", "_load_from_bytes")
    ]
    _write_pickle(path, b"cforeign_module\nThing\n)\x81.")
    assert repr(load_inert(path)) == "<foreign_module.Thing>"
    assert not trace.exists() and "foreign_module" not in sys.modules
    with pytest.raises(FileNotFoundError):  # and these pickles do mean harm
        pickle.loads(pickle.dumps(Call(open, str(tmp_path / "nowhere" / "trace"))))


@pytest.mark.parametrize(
    "target",
    [
        *("collections\nOrderedDict", "torch\nSize", "torch\nfloat32", "torch._utils\n_rebuild_tensor_v2"),
        *("torch._tensor\n_rebuild_from_type_v2", "_codecs\nencode", "os\nPathLike", "torch\nFloatStorage"),
    ],
)
def test_a_pickle_changes_nothing_that_it_can_name(target: str, tmp_path: Path) -> None:
    """BUILD with a dict of slots is setattr on whatever lies on the stack."""
    path, module, name = tmp_path / "file.pt", *target.split("\n")
    known = torch.Size if name == "Size" else getattr(sys.modules[module], name)
    before = set(vars(known)) if hasattr(known, "__dict__") else set()
    _write_pickle(path, f"c{target}\n(N}}X\x04\x00\x00\x00evilI1\nstb.".encode())
    if name == "FloatStorage":  # an object of torch.load's, made for this file
        load_inert(path)
    else:
        with pytest.raises(ValueError, match=r"file\.pt cannot be read"):
            load_inert(path)
    assert not hasattr(known, "evil") and before == (set(vars(known)) if before else set())


@pytest.mark.parametrize(
    "value",
    [
        Call(torch._utils._rebuild_tensor_v2, os, 0, (2,), (1,), False, OrderedDict()),
        Call(torch._utils._rebuild_tensor_v2, [1.0], 0, (2,), (1,), False, OrderedDict()),
        Call(torch._tensor._rebuild_from_type_v2, os.system, Tensor, ("true",), {}),
        Call(codecs.encode, "a", "rot13"),
    ],
    ids=["module", "list", "call inside of a rebuild", "codec"],
)
def test_what_builds_tensors_takes_storages_alone(value: Any, tmp_path: Path) -> None:
    if value.arguments[0] is os:
        value.arguments = (Call(os.getcwd), *value.arguments[1:])
    torch.save(value, tmp_path / "file.pt")
    with pytest.raises(ValueError, match=r"file\.pt cannot be read.*TypeError"):
        load_inert(tmp_path / "file.pt")


def test_numbers_of_numpy_and_what_is_no_zip(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"lr": numpy.float64(0.1), "count": numpy.int64(-3), "half": numpy.float16(1), "raw": b"\x00\xff"}, path)
    found = load_inert(path)
    assert (found["lr"], found["count"], found["raw"]) == (0.1, -3, b"\x00\xff")
    assert isinstance(found["half"], Inert)
    torch.save({}, path, _use_new_zipfile_serialization=False)
    with pytest.raises(ValueError, match=r"file\.pt cannot be read"):
        load_inert(path)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("file/data.pkl", pickle.dumps(0, 2))
    with pytest.raises(ValueError, match="is compressed"):
        load_inert(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("file/constants.pkl", pickle.dumps((), 2))
    with pytest.raises(ValueError, match="TorchScript"):
        load_inert(path)
