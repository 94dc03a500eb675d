"""The table of tile sizes, and how Triton's refusal is found in what others make of it."""

from functools import partial
from pathlib import Path

import pytest

from blockdraft.models.attention import bare_flex_attend, sdpa_attend
from blockdraft.models.block_mask import TILE
from blockdraft.models.tiles import SMALLER, lacks_resources, smaller_tiles


class OutOfResources(Exception):
    """Named as Triton's."""


def test_each_entry_divides_the_masks_tiles_and_is_smaller_than_the_one_before():
    for tiles in SMALLER:
        assert TILE % tiles.queries == TILE % tiles.keys == 0
    needs = [tiles.queries + tiles.keys * tiles.stages for tiles in SMALLER]
    assert needs == sorted(set(needs), reverse=True)


def test_the_table_is_for_flex_attention_as_torch_tunes_it():
    found = list(smaller_tiles(bare_flex_attend))
    assert [one.name for one in found] == [str(tiles) for tiles in SMALLER]
    for one, tiles in zip(found, SMALLER, strict=True):
        assert isinstance(one.make_attend, partial)
        options = one.make_attend.keywords["options"]
        assert options["fwd_BLOCK_M"] == options["bwd_BLOCK_M1"] == options["bwd_BLOCK_N2"] == tiles.queries
        assert options["fwd_num_stages"] == options["bwd_num_stages"] == tiles.stages
    assert list(smaller_tiles(sdpa_attend)) == list(smaller_tiles(found[0].make_attend)) == []


def raise_wrapped():
    try:
        try:
            raise OutOfResources("out of resource: shared memory, Required: 163840, Hardware limit: 101376.")
        except OutOfResources as error:
            raise ValueError("No valid triton configs") from error
    except ValueError as error:
        raise RuntimeError("backend='inductor' raised") from error


def test_the_reason_is_found_under_whatever_wraps_it():
    with pytest.raises(RuntimeError) as caught:
        raise_wrapped()
    assert lacks_resources(caught.value).startswith("out of resource: shared memory, Required: 163840")


def test_the_reason_is_found_in_a_message_alone():
    error = RuntimeError(
        "InductorError\nNo valid triton configs. OutOfResources: out of resource: shared memory\nSet X"
    )
    assert lacks_resources(error) == "No valid triton configs. OutOfResources: out of resource: shared memory"


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("shapes differ")])
def test_other_errors_are_none_of_it(error):
    assert lacks_resources(error) == ""


def test_the_documentation_has_the_table():
    page = (Path(__file__).parents[3] / "docs" / "performance.md").read_text()
    rows = [f"| {number} | {tiles} |" for number, tiles in enumerate(SMALLER, start=2)]
    assert "\n".join(rows) in page
