"""Stories about identity: ids, references, choices, lineage, the scored call (section 3, steps 1 to 4, 7, 10 to 13)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.corpus.telling import (
    Json,
    Story,
    call,
    function_call,
    message,
    output,
    refuses,
    said,
    selects,
    tool_result,
    user,
)

TWO = (call("c1", said("one")), call("c2", said("two"), parent="c1"))
BOTH = {"c1": "content", "c2": "content"}


def stories() -> Iterator[Story]:
    """Tell the stories of this file."""
    yield from _ids()
    yield from _references()
    yield from _lineage()
    yield from _terminals()


def _ids() -> Iterator[Story]:
    yield Story(
        "item_ids_tell_equal_texts_apart",
        """Two calls said the same; the history kept the item id that one of them served.""",
        [call("c1", message("ok", id="m1")), call("c2", message("ok", id="m2"))],
        output(message("ok", id="m2")),
        selects("c2", why={"c1": "not_returned", "c2": "item_id"}),
    )
    yield Story(
        "item_id_of_another_call",
        """The item has the id of one call and the words of another. Identity constrains and content must agree: the
        refusal names the owner of the id.""",
        [call("c1", message("one", id="m1")), call("c2", message("two", id="m2"))],
        output(message("two", id="m1")),
        refuses("match_missing", "m1", "c1", where="$.response.output[0]"),
    )
    yield Story(
        "item_identity_reused",
        """Two captured calls served the same item id. It names neither: refused with both owners.""",
        [call("c1", message("one", id="m1")), call("c2", message("two", id="m1"), parent="c1")],
        output(message("one", id="m1"), user(), message("two", id="m1")),
        refuses("item_identity_reused", "m1", "c1", "c2", where="$.response.output[0]"),
    )
    yield Story(
        "restarted_tool_call_ids",
        """The engine numbers tool calls from 0 in every turn and repeats that id as the item id. An id that equals its
        item's own tool-call id and that several calls served is no identity; content decides. NVIDIA's module
        refuses.""",
        [
            call("c1", function_call("call_0", "ls", '{"p":"a"}', id="call_0")),
            call("c2", function_call("call_0", "ls", '{"p":"b"}', id="call_0"), parent="c1"),
        ],
        output(
            function_call("call_0", "ls", '{"p":"a"}', id="call_0"),
            tool_result("call_0"),
            function_call("call_0", "ls", '{"p":"b"}', id="call_0"),
        ),
        selects("c1", "c2", why=BOTH),
    )
    yield Story(
        "call_identity_reused",
        """The capture holds two calls with one model_call_id: two files glued together, or a broken gateway.""",
        [call("c1", said("one")), call("c1", said("two"))],
        output(message("one")),
        refuses("call_identity_reused", "c1", where="call=c1"),
    )
    yield Story(
        "response_id_reused",
        """Two calls have one response id and the same choice index.""",
        [call("c1", said("one"), response_id="r"), call("c2", said("two"), response_id="r")],
        output(message("one")),
        refuses("call_identity_reused", "'r'", "c1", "c2", where="call=c2"),
    )
    choices = [
        call("c1", said("left"), response_id="r"),
        call("c2", said("right"), response_id="r", choice_index=1, same_prompt_as="c1"),
    ]
    yield Story(
        "choices",
        """One request with two choices; the harness went on with the second. The response id names both, the content
        picks exactly one.""",
        choices,
        output(message("right"), response_id="r"),
        selects("c2", terminal="r", why={"c1": "retry_superseded", "c2": "response_id"}),
    )
    yield Story(
        "choices_alike",
        """Both choices say the same with other log-probabilities: the response id names both and nothing picks one.""",
        [
            call("c1", said("same"), response_id="r"),
            call("c2", said("same"), response_id="r", choice_index=1, same_prompt_as="c1"),
        ],
        output(message("same"), response_id="r"),
        refuses("match_ambiguous", "c1", "c2", where="$.response.output[0]"),
    )
    yield Story(
        "choice_by_reference",
        """The trajectory references the response and its choice, so even equal choices are told apart.""",
        [
            call("c1", said("same"), response_id="r"),
            call("c2", said("same"), response_id="r", choice_index=1, same_prompt_as="c1"),
        ],
        {"ng_trajectory": _turns({"response_id": "r", "choice_index": 1}), "reward": 1.0},
        selects("c2", terminal="r", why={"c1": "retry_superseded", "c2": "reference"}),
    )


def _turns(*references: Json | None) -> Json:
    return {"turns": [{"model_calls": [] if reference is None else [reference]} for reference in references]}


def _references() -> Iterator[Story]:
    def by_reference(name: str, told: str, turns: Json, expect: Json, **fields: Any) -> Story:
        return Story(name, told, TWO, {"ng_trajectory": turns, **fields}, expect)

    both = {"c1": "reference", "c2": "reference"}
    first, second = {"response_id": "resp-c1"}, {"model_call_id": "c2"}
    yield by_reference(
        "references_only",
        """The trajectory references its model calls and nothing else is returned. The references are the selection.""",
        _turns(first, second),
        selects("c1", "c2", why=both),
        reward=1.0,
    )
    yield by_reference(
        "references_and_history",
        """References and history both, and they agree.""",
        _turns(first, second),
        selects("c1", "c2", why=both),
        **output(message("one"), user(), message("two")),
    )
    yield Story(
        "references_tell_equal_texts_apart",
        """Three calls said the same; the references name two of them, in order.""",
        [call(name, said("ok")) for name in ("c1", "c2", "c3")],
        {
            "trajectory": _turns({"model_call_id": "c3"}, {"model_call_id": "c1"}),
            **output(message("ok"), user(), message("ok")),
        },
        selects(
            "c3",
            "c1",
            why={"c1": "reference", "c2": "not_returned", "c3": "reference"},
            rows=[["c3"], ["c1"]],
        ),
    )
    yield by_reference(
        "references_partial",
        """The first turn references its call, the second does not. A harness that knows some and not others cannot be
        trusted with the rest.""",
        _turns(first, None),
        refuses("references_partial", "1 turn", where="$.ng_trajectory.turns[1]"),
    )
    yield by_reference(
        "reference_unknown",
        """A reference names a response that was not captured. The error names turn, reference and id.""",
        _turns(first, {"response_id": "resp-c9"}),
        refuses("reference_unknown", "resp-c9", where="$.ng_trajectory.turns[1].model_calls[0]"),
    )
    yield by_reference(
        "reference_keys_disagree",
        """One reference carries the response id of one call and the call id of another.""",
        _turns({"response_id": "resp-c1", "model_call_id": "c2"}),
        refuses("reference_contradictory", "resp-c1", "c2", where="$.ng_trajectory.turns[0].model_calls[0]"),
    )
    yield by_reference(
        "reference_without_key",
        """A reference that names nothing.""",
        _turns({"latency": 3}),
        refuses("reference_contradictory", "no key", where="$.ng_trajectory.turns[0].model_calls[0]"),
    )
    yield by_reference(
        "trajectories_differ",
        """The result carries two trajectories whose references differ.""",
        _turns(first),
        refuses("reference_contradictory", "two lists", where="$.trajectory"),
        trajectory=_turns(second),
    )
    yield by_reference(
        "trajectory_of_another_kind",
        """`trajectory` is a path to a file here. It is read only if it is an object with turns.""",
        _turns(first, second),
        selects("c1", "c2", why=both),
        trajectory="runs/7/trajectory.json",
    )
    yield by_reference(
        "reference_unreturned",
        """The references name a call more than the history holds.""",
        _turns(first, second),
        refuses("reference_unreturned", "c2", where="$.ng_trajectory.turns[1].model_calls[0]"),
        **output(message("one")),
    )
    yield by_reference(
        "reference_and_content_disagree",
        """The first reference expects one call, the first reply is another's. The refusal says what was expected.""",
        _turns(second, first),
        refuses("match_missing", "references expect c2", where="$.response.output[0]"),
        **output(message("one"), user(), message("two")),
    )
    yield by_reference(
        "reference_twice",
        """A reference list names one call twice; trained twice it would count double.""",
        _turns(first, second, {"model_call_id": "c1"}),
        refuses("selection_duplicated", "c1", where="$.ng_trajectory.turns[2].model_calls[0]"),
    )
    yield by_reference(
        "reference_only_declared_terminal_outside",
        """References only, and the declared terminal is a captured call that they do not name.""",
        _turns(first),
        refuses("declared_terminal_not_selected", "resp-c2", where="$.terminal_response_id"),
        terminal_response_id="resp-c2",
    )


def _lineage() -> Iterator[Story]:
    yield Story(
        "lineage_broken",
        """A returned call, proven by its item id, continues a call that was never captured. Part of the rollout is
        missing.""",
        [call("c2", message("two", id="m2"), parent="c1")],
        output(message("two", id="m2")),
        refuses("lineage_broken", "'c1'", "'c2'", where="call=c2"),
    )
    yield Story(
        "lineage_cycle",
        """Two calls name each other as parent. No such thing ever ran.""",
        [call("c1", message("one", id="m1"), parent="c2"), call("c2", message("two"), parent="c1")],
        output(message("one", id="m1")),
        refuses("lineage_broken", "come back", where="call=c1"),
    )
    yield Story(
        "ancestors_never_added",
        """The harness returned the last reply only. Its ancestor is evidence and stays context: membership is what was
        returned.""",
        TWO,
        output(message("two"), response_id="resp-c2"),
        selects("c2", why={"c1": "not_returned", "c2": "response_id"}),
    )


def _terminals() -> Iterator[Story]:
    yield Story(
        "scored_response_names_the_last_call",
        """The scored response has the id of a captured call: that call is the terminal, and proven.""",
        TWO,
        output(message("one"), user(), message("two"), response_id="resp-c2"),
        selects("c1", "c2", why={"c1": "content", "c2": "response_id"}),
    )
    yield Story(
        "declared_terminal_in_the_middle",
        """The harness says which reply it kept; it is not the last of the history.""",
        TWO,
        output(message("one"), user(), message("two"), terminal_response_id="resp-c1"),
        selects("c1", "c2", terminal="resp-c1", why={"c1": "response_id", "c2": "content"}),
    )
    yield Story(
        "terminal_not_selected",
        """The scored response is a captured call whose reply the history does not hold. The reward belongs to something
        that was not returned.""",
        TWO,
        {
            "responses": [{"output": [message("one")]}],
            "response": {"id": "resp-c2", "output": [message("two")]},
        },
        refuses("terminal_not_selected", "resp-c2", "c2", where="$.response.id"),
    )
    yield Story(
        "declared_terminal_not_selected",
        """The declared terminal is captured and not in the history.""",
        TWO,
        output(message("one"), terminal_response_id="resp-c2"),
        refuses("declared_terminal_not_selected", "resp-c2", where="$.terminal_response_id"),
    )
    yield Story(
        "declared_terminal_unknown",
        """The declared terminal was never captured: the harness names a reply that did not come through here.""",
        TWO,
        output(message("one"), user(), message("two"), terminal_response_id="resp-c9"),
        refuses("declared_terminal_not_selected", "resp-c9", "no captured call", where="$.terminal_response_id"),
    )
    yield Story(
        "declared_terminal_conflict",
        """Scored and declared id name two calls, both in the history.""",
        TWO,
        output(message("one"), user(), message("two"), response_id="resp-c2", terminal_response_id="resp-c1"),
        refuses("declared_terminal_conflict", "resp-c1", "resp-c2", where="$.terminal_response_id"),
    )
