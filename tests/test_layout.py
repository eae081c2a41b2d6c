"""The integer geometry of buckets, for any sizes and any world; and what the files of the package may import."""

from __future__ import annotations

import ast
import itertools
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

import zero_shard
from zero_shard.layout import (
    ALIGNMENT_NUMEL,
    BLOCK_NUMEL,
    BucketLayout,
    capped_bucket_nbytes,
    dense_strides,
    lay_out,
    split_into_buckets,
)

_numels = st.lists(st.one_of(st.integers(0, 70), st.sampled_from([0, 1, 4096, 10007])), max_size=12)
_worlds = st.integers(1, 9)
_alignments = st.sampled_from([ALIGNMENT_NUMEL, BLOCK_NUMEL])
_layouts = given(numels=_numels, num_shards=_worlds, alignment=_alignments, replicas=st.integers(1, 4))
_quick = settings(max_examples=150, deadline=None, derandomize=True)


def _owners(layout: BucketLayout) -> list[dict[int, int]]:
    """Return for each slot which shard owns each element of its parameter; fails where two own the same one."""
    owners: list[dict[int, int]] = [{} for _ in layout.slots]
    for rank in range(layout.num_shards):
        for segment in layout.segments(rank):
            for element in range(segment.param_start, segment.param_start + segment.numel):
                assert element not in owners[segment.slot], f"two owners of element {element} of slot {segment.slot}"
                owners[segment.slot][element] = rank
    return owners


@_quick
@_layouts
def test_every_element_has_exactly_one_owner(numels: list[int], num_shards: int, replicas: int, alignment: int) -> None:
    layout = lay_out(numels, num_shards, replicas, alignment)
    for owned, numel in zip(_owners(layout), numels, strict=True):
        assert sorted(owned) == list(range(numel))


@_quick
@_layouts
@example(numels=[], num_shards=3, alignment=16, replicas=1)
@example(numels=[0, 0], num_shards=2, alignment=16, replicas=2)
def test_slots_are_aligned_disjoint_and_inside(
    numels: list[int], num_shards: int, replicas: int, alignment: int
) -> None:
    layout = lay_out(numels, num_shards, replicas, alignment)
    assert [slot.numel for slot in layout.slots] == numels
    end = 0
    for slot in layout.slots:
        assert slot.offset >= end
        assert slot.offset % alignment == 0
        end = slot.offset + slot.numel
    assert layout.numel >= end


@_quick
@_layouts
def test_shards_are_equal_aligned_and_cover_the_bucket(
    numels: list[int], num_shards: int, replicas: int, alignment: int
) -> None:
    layout = lay_out(numels, num_shards, replicas, alignment)
    ranges = [layout.shard_range(rank) for rank in range(num_shards)]
    assert [start for start, _ in ranges] == [rank * layout.shard_numel for rank in range(num_shards)]
    assert ranges[0][0] == 0 and ranges[-1][1] == layout.numel
    for (_, stop), (start, _) in itertools.pairwise(ranges):
        assert stop == start
    assert layout.shard_numel % replicas == 0, "a shard splits evenly over the replicas"
    assert layout.shard_numel // replicas % alignment == 0
    padding_numel = layout.numel - sum(numels)
    assert padding_numel < alignment * (len(numels) + num_shards * replicas), "padding is bounded"


@_quick
@_layouts
def test_segments_are_ascending_and_lie_where_the_slots_do(
    numels: list[int], num_shards: int, replicas: int, alignment: int
) -> None:
    layout = lay_out(numels, num_shards, replicas, alignment)
    for rank in range(num_shards):
        end, shard_start = 0, layout.shard_range(rank)[0]
        for segment in layout.segments(rank):
            assert segment.numel > 0
            assert segment.shard_start >= end
            end = segment.shard_start + segment.numel
            assert layout.slots[segment.slot].offset + segment.param_start == shard_start + segment.shard_start
        assert end <= layout.shard_numel


@_quick
@given(nbytes=st.lists(st.integers(0, 100), max_size=20), bucket_nbytes=st.integers(1, 120))
def test_buckets_take_every_parameter_once_and_keep_to_their_size(nbytes: list[int], bucket_nbytes: int) -> None:
    buckets = split_into_buckets(nbytes, bucket_nbytes)
    assert [position for bucket in buckets for position in bucket] == list(range(len(nbytes)))
    for bucket in buckets:
        assert len(bucket) == 1 or (len(bucket) > 1 and sum(nbytes[i] for i in bucket) <= bucket_nbytes)
    for left, right in itertools.pairwise(buckets):  # nothing is cut earlier than it must be
        assert sum(nbytes[i] for i in left) + nbytes[right[0]] > bucket_nbytes


def test_large_parameters_have_buckets_of_their_own_and_small_ones_go_together() -> None:
    large = 1 << 20
    assert split_into_buckets([3, large, 4, 5, large - 1, large + 1], 12, True) == [[1], [5], [0, 2, 3], [4]]
    assert split_into_buckets([3, large, 4], 2 * large) == [[0, 1, 2]]


@_quick
@given(bucket_mib=st.floats(1e-5, 65536), model_nbytes=st.integers(0, 1 << 40))
def test_bucket_is_never_larger_than_asked_or_than_the_model_needs(bucket_mib: float, model_nbytes: int) -> None:
    nbytes = capped_bucket_nbytes(bucket_mib, model_nbytes)
    assert 0 <= nbytes <= bucket_mib * 2**20
    assert nbytes <= max(1 << 20, model_nbytes // 8 + 1)
    small = min(bucket_mib * 2**20, 1 << 20)
    assert nbytes >= int(small), "a small model needs no tiny buckets"


@st.composite
def _strided(draw: st.DrawFn) -> torch.Tensor:
    """Tensors as parameters come: permuted, sliced, expanded, with dimensions of length 0 and 1."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    tensor = tensor.permute(draw(st.permutations(range(len(shape)))))
    if shape and draw(st.booleans()):
        tensor = tensor[..., : draw(st.integers(0, 4))]
    if shape and draw(st.booleans()):
        tensor = tensor[..., ::2]
    return tensor.unsqueeze(0).expand(2, *tensor.shape) if draw(st.booleans()) else tensor


@_quick
@given(tensor=_strided())
def test_dense_strides_address_each_element_once_without_gaps(tensor: torch.Tensor) -> None:
    strides = dense_strides(tensor.shape, tensor.stride())
    places = sorted(
        sum(index * step for index, step in zip(indices, strides, strict=True))
        for indices in itertools.product(*map(range, tensor.shape))
    )
    assert places == list(range(tensor.numel()))
    kept = torch.empty(tensor.numel()).as_strided(tensor.shape, strides)
    assert torch.equal(kept.copy_(tensor), tensor)


@_quick
@given(shape=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_dense_strides_keep_a_permutation(shape: list[int], data: st.DataObject) -> None:
    tensor = torch.empty(shape).permute(data.draw(st.permutations(range(len(shape)))))
    strides = dense_strides(tensor.shape, tensor.stride())
    significant = [axis for axis, length in enumerate(tensor.shape) if length > 1]
    assert [strides[axis] for axis in significant] == [tensor.stride(axis) for axis in significant]


# --- imports ---

# Lowest first; a file imports from lines above its own, and within a line without cycles.
_ORDER = [
    ["topology", "phases", "commands"],
    [
        "layout",
        "module_names",
        "roll_call",
        "pages",
        "config",
        "groups",
        "apex_kernels",
        "number_formats",
        "random_bits",
        "canonical_sums",
    ],
    ["block_codec"],
    ["adamw_math", "wire_codec"],
    ["operator_checks"],
    ["twins"],
    ["ops"],
    ["selfcheck.case", "selfcheck.inputs"],
    ["selfcheck.copies", "selfcheck.sums", "selfcheck.adamw"],
    ["selfcheck"],
    ["seen_weights", "grad_source"],
    ["buffers"],
    ["fake_group"],
    ["collectives.groups"],
    ["collectives.pending"],
    ["collectives.agreements"],
    ["collectives.communicator"],
    ["collectives", "masters"],
    ["precision"],
    ["norms", "part_reductions", "sharded_grad"],
    [
        *("stages.base", "stages.slots", "stages.released", "stages.schedule", "stages.unit", "stages.units"),
        *(
            "stages.materialize",
            "stages.hooks",
            "stages.gathers",
            "stages.crossings",
            "stages.exchanges",
            *("stages.rounds", "stages.backward_end", "stages.accumulation_hooks"),
            *("stages.plain_gradients", "stages.slot_gradients", "stages.gradient_norms"),
            "stages.reduction",
            "stages.optimizer_state",
            "stages.gradients",
            "stages.parameters",
            "stages",
        ),
    ],
    ["gathering", "construction", "copying", "agreement", "promises", "state", "tables", "uneven_inputs"],
    ["clipping", "skipping", "tenure"],
    ["held_state", "gradient_watch"],
    ["failure_text"],
    ["failure_report"],
    ["update"],
    ["rehearsal.memory", "rehearsal.skeleton", "rehearsal.run", "rehearsal.auto", "rehearsal"],
    ["adamw"],
    ["interchange.imported", "interchange.inert_pickle", "interchange.adam_groups"],
    ["interchange.deepspeed_files", "interchange.deepspeed_keys"],
    ["interchange.deepspeed_reading"],
    ["interchange.deepspeed_script"],
    ["interchange.deepspeed_config"],
    ["interchange.deepspeed", "interchange.apex", "interchange.torch_files"],
    ["interchange"],
    ["interchange.command"],
    ["averaging"],
    ["monitor.drift", "monitor.timer", "monitor.outputs", "monitor.facts"],
    ["monitor.numbers"],
    ["monitor.monitor"],
    ["monitor"],
    ["checkpoint.rectangles", "checkpoint.random_states"],
    ["checkpoint.parts", "checkpoint.places", "checkpoint.writer"],
    ["checkpoint.reader", "checkpoint.directory", "checkpoint.contents", "checkpoint.weight_files"],
    ["checkpoint.index", "checkpoint.safetensors_files"],
    ["checkpoint.saving", "checkpoint.opening"],
    ["checkpoint.loading"],
    ["checkpoint.stored"],
    ["checkpoint.exporting", "checkpoint.inspection"],
    ["checkpoint.importing"],
    ["checkpoint.command"],
    ["checkpoint.background"],
    ["checkpoint", "rollback"],
    ["planning.links", "planning.models", "planning.result", "planning"],
    ["planning.chart", "planning.sources"],
    ["planning.command"],
    ["reporting.reader"],
    ["reporting.thinning", "reporting.summary"],
    ["reporting.page"],
    ["reporting"],
    ["reporting.command"],
    ["integrations", "integrations.accelerate", "integrations.lightning"],
    ["integrations.transformers"],
    [""],
    ["doctor"],
    ["cli"],
    ["__main__"],
]
_ROOT = Path(zero_shard.__file__).parent


def _name_of(path: Path) -> str:
    parts = path.relative_to(_ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


_FILES = {_name_of(path): path for path in sorted(_ROOT.rglob("*.py"))}


def _imports(path: Path) -> set[str]:
    """Return the files of the package that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative import"
            full = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [each if each.removeprefix("zero_shard.") in _FILES else str(node.module) for each in full]
        else:
            continue
        found |= {
            name.removeprefix("zero_shard").removeprefix(".") for name in names if name.split(".")[0] == "zero_shard"
        }
    return found


def test_imports_go_one_way() -> None:
    level = {name: number for number, names in enumerate(_ORDER) for name in names}
    assert set(_FILES) <= set(level), f"files without a place in the order: {sorted(set(_FILES) - set(level))}"
    imports = {name: _imports(path) for name, path in _FILES.items()}
    assert imports["adamw"] >= {"config", "collectives", "stages"}, "the test sees the imports"
    for name, imported in imports.items():
        for other in imported:
            assert level[other] <= level[name], f"{name or '__init__'} imports {other}, which comes after it"
    pending = dict(imports)
    while pending:
        free = [name for name, imported in pending.items() if not imported & set(pending) - {name}]
        assert free, f"imports in a circle: {pending}"
        for name in free:
            assert name not in imports[name], f"{name} imports itself"
            del pending[name]


def test_other_libraries_are_not_imported_with_the_package() -> None:
    for name, path in _FILES.items():
        if not name.startswith("integrations"):
            assert not any(each.startswith("integrations") for each in _imports(path)), f"{name} imports an integration"


@pytest.mark.parametrize(
    "name", sorted(name for name in _FILES if name.split(".")[0] not in ("collectives", "fake_group"))
)
def test_only_collectives_uses_torch_distributed(name: str) -> None:
    """Checkpoint code may use the engine, ``torch.distributed.checkpoint``."""
    for node in ast.walk(ast.parse(_FILES[name].read_text(encoding="utf-8"))):
        found = ""
        if isinstance(node, ast.Attribute):
            found = ast.unparse(node)
        elif isinstance(node, ast.ImportFrom):
            found = str(node.module)
            if found == "torch":
                found = "torch.distributed" if any(alias.name == "distributed" for alias in node.names) else found
        elif isinstance(node, ast.Import):
            found = " ".join(alias.name for alias in node.names)
        if "torch.distributed" in found and not (
            name.startswith("checkpoint.") and "torch.distributed.checkpoint" in found
        ):
            pytest.fail(f"{name}.py:{node.lineno} uses {found}")
