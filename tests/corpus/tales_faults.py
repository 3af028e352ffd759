"""Stories of faults that Gristmill itself had while it was written; each keeps the answer that the rules demand."""

from __future__ import annotations

from collections.abc import Iterator

from tests.corpus.telling import (
    Json,
    Story,
    call,
    function_call,
    message,
    output,
    reasoning,
    refuses,
    said,
    selects,
    tool_result,
    user,
)

COMPACTION: Json = {"type": "compaction"}


def stories() -> Iterator[Story]:
    """Tell the stories of this file."""
    yield from _evidence()
    yield from _twins()
    yield from _order()
    yield _deep_role()
    yield from _captured()


def _f(call_id: str, given: str = "{}", name: str = "f") -> Json:
    return function_call(call_id, name, given)


def _evidence() -> Iterator[Story]:
    yield Story(
        "renamed_ids_with_twins",
        """Renamed tool-call ids, and two calls with equal words of which one continues the other, so that one renaming
        fits. The proof that no other does once read past the end of a call and broke.""",
        [
            call("c1", message("ab"), _f("srv_1")),
            call("c2", message("ab"), _f("srv_2"), parent="c1"),
            call("c3", said("done"), parent="c2"),
        ],
        output(message("ab"), _f("h1"), user(), message("ab"), _f("h2"), user(), message("done")),
        selects(
            "c1", "c2", "c3", why=dict.fromkeys(("c1", "c2", "c3"), "content"), options={"tool_call_ids": "renamed"}
        ),
    )
    yield Story(
        "choices_both_held",
        """A declared id names two choices, and the history has room for exactly one of them in every reading that
        counts. Readings that hold both or none were once shown as evidence.""",
        [
            call("c0", said("ab"), response_id="r0"),
            call("c2", said("ab"), response_id="r1", choice_index=1, parent="c0"),
            call("c1", said("ab"), response_id="r1", parent="c0"),
            call("c4", said("ab"), response_id="r3", choice_index=1, parent="c1"),
            call("c3", said("ab"), response_id="r3"),
        ],
        {"messages": [said("ab"), said("ab"), said("ab")], "terminal_response_id": "r3"},
        refuses("match_ambiguous", "c3", "c4", where="$.messages[0]"),
    )
    yield Story(
        "native_envelope_with_choices",
        """An envelope's id names three choices, and another call with the same words, the scored one, could only stand
        in that envelope. Once it was selected there in place of the envelope's own calls.""",
        [
            call("c0", message("a"), message("b"), response_id="r0"),
            call("c1", message("a"), message("b"), response_id="r1"),
            call("c2", message("a"), message("b"), response_id="r2", parent="c1"),
            call("c3", message("a"), message("b"), response_id="r2", choice_index=1),
            call("c4", message("a"), message("b"), response_id="r2", choice_index=2, parent="c1"),
            call("c5", said("c"), response_id="r5"),
            call("c6", message("a"), message("b"), response_id="r6"),
        ],
        {
            "responses": [
                {"id": "r1", "output": [user(), message("a"), message("b")]},
                {"id": "r2", "output": [message("a"), message("b")]},
                {"id": "r5", "output": [COMPACTION, message("c")]},
                {"id": "r6", "output": [COMPACTION, message("a"), message("b")]},
            ],
            "response": {"output": [], "id": "r0"},
        },
        refuses("terminal_not_selected", "r0", where="$.response.id"),
    )
    yield Story(
        "declared_terminal_unknown_and_ambiguous",
        """The declared terminal was never captured, and the history is ambiguous besides. Filter (a) comes first: no
        reading can hold the declared call, so that is the refusal.""",
        [call("c0", said("b"), response_id="r0"), call("c1", said("b"), response_id="r0", choice_index=1)],
        output(message("b"), response_id="h", terminal_response_id="r2"),
        refuses("declared_terminal_not_selected", "r2", where="$.terminal_response_id"),
    )
    yield Story(
        "declared_terminal_proves_its_ancestors",
        """The declared call has the same words as others. Every reading that counts holds it, so its ancestors are
        evidence, and they settle which of the equal calls were returned.""",
        [
            call("c0", said("ab")),
            call("c1", said("c"), parent="c0"),
            call("c2", said("ab"), tokens_of="c0"),
            call("c3", said("c"), parent="c2"),
            call("c4", said("ab"), parent="c3"),
        ],
        output(message("ab"), message("c"), message("ab"), terminal_response_id="resp-c4"),
        selects(
            "c2",
            "c3",
            "c4",
            why={
                "c0": "retry_superseded",
                "c1": "not_returned",
                "c2": "lineage",
                "c3": "lineage",
                "c4": "response_id",
            },
        ),
    )

    yield Story(
        "evidence_narrows_step_by_step",
        """The native call proves its ancestors, and one reading holds them all. What the rest of that reading would
        require in turn fits into no remaining reading; it must not throw away what was settled before.""",
        [
            call("c0", said("")),
            call("c1", said("")),
            call("c2", said(""), parent="c1"),
            call("c3", said("ab"), parent="c2"),
            call("c4", said(""), parent="c1", tokens_of="c2"),
            call("c5", said(""), parent="c4"),
        ],
        {
            "responses": [
                {"id": "resp-c5", "output": [message(""), message(""), tool_result("t"), message("")]},
                {"id": "h1", "output": [tool_result("t"), message("ab")]},
            ]
        },
        selects(
            "c1",
            "c4",
            "c5",
            "c3",
            why={
                "c0": "not_returned",
                "c1": "lineage",
                "c2": "retry_superseded",
                "c3": "content",
                "c4": "lineage",
                "c5": "response_id",
            },
            rows=[["c1", "c4", "c5"], ["c3"]],
        ),
    )
    yield Story(
        "forced_twin_without_parent",
        """The declared call has a twin, and both continue a call that was never captured. The declared one is in every
        reading, so its missing parent breaks the lineage, twin or not.""",
        [
            call("c2", said(""), parent="c0"),
            call("c4", said("ab"), parent="c3"),
            call("c5", said("ab"), parent="c3", tokens_of="c4"),
        ],
        {
            "response": {"contains_transitions": True, "output": [[message("")], [message("ab")]]},
            "terminal_response_id": "resp-c5",
        },
        refuses("lineage_broken", "c3", where="call=c5"),
    )
    yield Story(
        "snapshots_with_minted_ids",
        """Cumulative snapshots whose item ids are made anew for each snapshot. Such an id was never served and is no
        identity, so it cannot say that the item is new: the repeat may be a repeat, or the retry with the same words.
        Once the retry was selected.""",
        [call("c1", said("a")), call("x1", said("a")), call("c2", said("b"), parent="c1")],
        {
            "response": {
                "contains_transitions": True,
                "output": [[message("a", id="x1")], [message("a", id="x2"), message("b", id="x3")]],
            }
        },
        refuses("snapshot_ambiguous", "x1"),
    )
    yield Story(
        "empty_reply_is_no_part_of_another",
        """An empty reply continues the scored one. What the harness returned is the scored reply alone, without the
        empty turn, so the content names one call and not two.""",
        [call("c1", said("one")), call("c2", said(""), parent="c1", samples=0)],
        output(message("one")),
        selects(
            "c1",
            "c2",
            terminal="resp-c1",
            why={"c1": "captured", "c2": "captured"},
            rows=[["c1"]],
            empty=["c2"],
            policy="all_captured",
        ),
    )
    yield Story(
        "blank_reply_under_trim",
        """With `whitespace=trim` a reply of nothing but blanks is an empty one, and equals an empty turn. It once broke
        the option for the whole rollout.""",
        [call("c1", said(" "), _f("t1")), call("c2", said(" \n"), parent="c1")],
        output(_f("t1"), user(), message("")),
        selects("c1", "c2", why={"c1": "content", "c2": "content"}, options={"whitespace": "trim"}),
    )


def _twins() -> Iterator[Story]:
    reply = (message("ab"), message("b"), _f("t"))
    yield Story(
        "required_twin_represents",
        """Of two interchangeable calls one is the parent of the declared call. That one stands for both, not the one
        with the smaller id.""",
        [
            call("c0", said("a")),
            call("c1", *reply, parent="c0"),
            call("c2", *reply, parent="c0", tokens_of="c1"),
            call("c3", *reply, parent="c2"),
        ],
        output(message("a"), *reply, *reply, terminal_response_id="resp-c3"),
        selects(
            "c0",
            "c2",
            "c3",
            why={"c0": "content", "c1": "retry_superseded", "c2": "lineage", "c3": "response_id"},
        ),
    )
    said_twice = [reasoning("r"), message("b")]
    yield Story(
        "twins_prove_their_parent",
        """Four calls say the same in three places; two of them are twins, and every reading holds one of the twins. So
        their parent is proven, and the readings shown must hold it.""",
        [
            call("c1", *said_twice),
            call("c2", *said_twice, parent="c1"),
            call("c3", *said_twice, parent="c1", tokens_of="c2"),
            call("c4", *said_twice, parent="c1"),
        ],
        {"messages": [said("b", reasoning_content="r")] * 3},
        refuses("match_ambiguous", "c4", where="$.messages[2]"),
    )
    yield Story(
        "twin_parents_follow_twins",
        """Two twins have two children that are twins of each other, both continuing the second twin. Every reading
        holds a child, so the second twin is required and represents the pair.""",
        [
            call("c0", message("a"), _f("t", name="g")),
            call("c1", message("a"), _f("t", name="g"), tokens_of="c0"),
            call("c4", reasoning("s"), message("ab"), parent="c1"),
            call("c3", reasoning("s"), message("ab"), parent="c1", tokens_of="c4"),
        ],
        output(message("a"), _f("t", name="g"), reasoning("s"), message("ab")),
        selects(
            "c1",
            "c3",
            why={
                "c0": "retry_superseded",
                "c1": "lineage",
                "c3": "interchangeable",
                "c4": "retry_superseded",
            },
        ),
    )
    yield Story(
        "twin_hides_a_third_call",
        """One of two twins is required. The other place could hold its twin or a third call with the same words and
        other tokens: two different sets. Once the twins were collapsed too early, and a wrong call was selected.""",
        [
            call("c0", said("a")),
            call("c1", said("")),
            call("c2", said("ab")),
            call("c3", said("a")),
            call("c4", said("a"), tokens_of="c3"),
            call("c6", said("b"), parent="c4"),
            call("c7", said("b"), parent="c1"),
        ],
        {"messages": [said(text) for text in ("a", "", "ab", "a", "b", "b")]},
        refuses("match_ambiguous", "c0", "c3", where="$.messages[0]"),
    )
    twin = (message("b"), _f("t_0", '{"n":2}'))
    yield Story(
        "other_twin_allows_another_order",
        """With one twin in place a call seems impossible, because it is that twin's descendant; with the other twin it
        fits. Two sets of calls can be read, so the rollout is refused.""",
        [
            call("c0", _f("t_0", '{"n":2}'), _f("t_1")),
            call("c1", _f("t_0", '"ls"'), parent="c0"),
            call("c2", said("")),
            call("c3", said("a")),
            call("c4", message("b"), _f("t_1", '{"n":2}'), parent="c1"),
            call("c5", said(""), parent="c4"),
            call("c6", message("b"), _f("t_1", '{"n":2}'), parent="c1", tokens_of="c4"),
        ],
        output(
            _f("t_0", '{"n":2}'),
            _f("t_1"),
            _f("t_0", '"ls"'),
            user(),
            message(""),
            COMPACTION,
            message("a"),
            twin[0],
            _f("t_1", '{"n":2}'),
        ),
        refuses("match_ambiguous", "c2", "c5", where="$.response.output[4]"),
    )


def _order() -> Iterator[Story]:
    yield Story(
        "twins_both_returned_in_commit_order",
        """Both twins were returned. Each is a member; they stand in commit order, and none is put first for having the
        smaller id.""",
        [call("c1", said("a")), call("c2", said("a"), tokens_of="c1")],
        {
            "responses": [{"id": "resp-c2", "output": [message("a"), message("a")]}],
            "response": {"id": "resp-c2"},
        },
        selects("c1", "c2", why={"c1": "content", "c2": "response_id"}, rows=[["c1"], ["c2"]]),
    )
    yield Story(
        "least_reading_over_segmentations",
        """Empty turns may belong to a call's span or be a call of their own, so one set of calls can be read in two
        orders. The one least in commit order is given.""",
        [
            call("c0", message("ab"), _f("t_1", name="g"), message("")),
            call("c1", message("b"), _f("t_1", '{"n":1}', name="g"), _f("t_2")),
            call("c2", said("")),
        ],
        output(
            user(),
            message("ab"),
            _f("t_1", name="g"),
            message(""),
            COMPACTION,
            message("b"),
            _f("t_1", '{"n":1}', name="g"),
            _f("t_2"),
            message(""),
            terminal_response_id="resp-c2",
        ),
        selects(
            "c0",
            "c1",
            "c2",
            why={"c0": "content", "c1": "content", "c2": "response_id"},
            rows=[["c0"], ["c1"], ["c2"]],
        ),
    )


def _deep_role() -> Story:
    role: Json | str = "user"
    for _ in range(200):
        role = {"role": role}
    return Story(
        "role_nested_deep",
        """The role of a message is an object, nested two hundred deep. A refusal that quoted it would itself break.""",
        [call("c1", said("one"))],
        {"messages": [{"role": role, "content": "one"}]},
        refuses("output_malformed", "string", where="$.messages[0].role"),
    )


def _captured() -> Iterator[Story]:
    asked = user("mend it")
    tool: Json = {"id": "t1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    served: Json = {"role": "assistant", "content": "\n\n", "tool_calls": [tool]}
    echoed: Json = {"role": "assistant", "content": None, "tool_calls": [tool]}
    told: Json = {"role": "tool", "tool_call_id": "t1", "content": "ok"}
    again: Json = {"messages": [asked, echoed, told]}
    yield Story(
        "blank_text_keeps_the_parent",
        """A template leaves two line ends between a thought and a tool call, the engine serves them as text, and the
        harness does not send them back. The requests after it once continued nothing, so that the reply that was thrown
        away could not be told from one that nobody asked again for.""",
        [
            call("c1", served, request={"messages": [asked]}),
            call("x2", said("not this"), request=again),
            call("c2", said("done"), request=again, same_prompt_as="x2"),
        ],
        {"messages": [asked, served, told, said("done")]},
        selects("c1", "c2", why={"c1": "content", "c2": "content", "x2": "retry_superseded"}, rows=[["c1"], ["c2"]]),
    )
    nines = "9" * 6000
    yield Story(
        "exponent_of_six_thousand_digits",
        """Arguments hold a number whose exponent has thousands of digits, and the harness writes it shifted by one.
        Reckoning with it once cost the square of its length; the two are the same value.""",
        [call("c1", function_call("t1", "f", f'{{"a":1e{nines}}}'))],
        output(function_call("t1", "f", f'{{"a":10e{nines[:-1]}8}}')),
        selects("c1", why={"c1": "content"}),
    )
