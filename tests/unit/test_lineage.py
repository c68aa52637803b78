"""The arithmetic of lineages against lists that name each index's owner."""

from __future__ import annotations

from bus_model import owners, shared
from hypothesis import given
from hypothesis import strategies as st

from arriero.transports import lineage as lineages
from arriero.transports.lineage import Segment

GivenText = tuple[list[Segment], int]
epochs = st.sampled_from(["1.5", "1.6", "1.7", "2.8"])


@st.composite
def texts(draw: st.DrawFn) -> GivenText:
    """A lineage and a count of tokens. Epochs are never repeated, starts never fall, the first is 0."""
    names = draw(st.lists(epochs, min_size=1, max_size=4, unique=True))
    starts = [0, *sorted(draw(st.lists(st.integers(0, 12), min_size=len(names) - 1, max_size=len(names) - 1)))]
    return [Segment(name, start) for name, start in zip(names, starts, strict=True)], draw(st.integers(0, 15))


@given(texts())
def test_a_lineage_survives_the_round_trip(given_text: GivenText) -> None:
    segments, _ = given_text
    assert lineages.parse(lineages.dump(segments)) == segments
    assert lineages.last_epoch(lineages.dump(segments)) == segments[-1].epoch


@given(texts(), texts())
def test_texts_agree_as_far_as_their_owners_do(one: GivenText, other: GivenText) -> None:
    (a, n), (b, m) = one, other
    plain = shared(owners([*a], n), owners([*b], m))
    assert lineages.common(lineages.dump(a), n, lineages.dump(b), m) == plain
    assert lineages.common(lineages.dump(b), m, lineages.dump(a), n) == plain


@given(texts(), st.data())
def test_each_index_has_its_owner(given_text: GivenText, data: st.DataObject) -> None:
    segments, count = given_text
    index = data.draw(st.integers(0, 20))
    assert lineages.epoch_at(lineages.dump(segments), index) == owners([*segments], index + 1)[index]
    assert count >= 0


@given(texts(), st.data())
def test_what_a_reader_has_of_this_very_text_is_kept(given_text: GivenText, data: st.DataObject) -> None:
    segments, count = given_text
    shown = data.draw(st.integers(0, count))
    lineage = lineages.dump(segments)
    epoch = lineages.epoch_at(lineage, shown - 1) if shown else ""
    assert lineages.kept(lineage, "r", "r", epoch, shown) == shown
    assert lineages.kept(lineage, "another", "r", epoch, shown) == 0


@given(texts(), st.integers(0, 15))
def test_what_an_epoch_unknown_to_the_text_decoded_is_not_kept(given_text: GivenText, shown: int) -> None:
    segments, _ = given_text
    assert lineages.kept(lineages.dump(segments), "r", "r", "9.9", shown) == 0


@given(texts(), st.integers(0, 15))
def test_an_extended_lineage_keeps_what_lies_before(given_text: GivenText, start: int) -> None:
    segments, _ = given_text
    lineage = lineages.extended(lineages.dump(segments), "3.9", start)
    assert owners([*lineages.parse(lineage)], 30)[:start] == owners([*segments], start)
    assert lineages.epoch_at(lineage, start) == "3.9"


def test_epochs_of_one_root_compare_by_attempt_then_fence() -> None:
    assert lineages.order("1.9") < lineages.order("1.10") < lineages.order("2.1")
    assert lineages.epoch_of(2, 7) == "2.7"
