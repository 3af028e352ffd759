"""Stories about histories: envelopes, snapshots, bounds, readings (selection page, section 3, steps 5, 6, 8 and 9)."""

from __future__ import annotations

from collections.abc import Iterator

from tests.corpus.telling import (
    Story,
    call,
    function_call,
    message,
    output,
    reasoning,
    refuses,
    said,
    selects,
    tool_call,
    tool_result,
    tools,
    user,
)

BOTH = {"c1": "content", "c2": "content"}
TWO = (call("c1", said("one")), call("c2", said("two"), parent="c1"))


def stories() -> Iterator[Story]:
    """Tell the stories of this file."""
    yield from _harnesses()
    yield from _envelopes()
    yield from _snapshots()
    yield from _spans()
    yield from _misses()
    yield from _ambiguities()


def _harnesses() -> Iterator[Story]:
    yield Story(
        "retry_nobody_received",
        """The first answer to the second turn was lost on its way, so the harness asked again. Both replies were
        sampled; the history holds the second. The first is out because the included one answers the same request.""",
        [
            call("c1", said("one")),
            call("x2", said("zwei"), parent="c1"),
            call("c2", said("two"), parent="c1", same_prompt_as="x2"),
        ],
        output(message("one"), user(), message("two")),
        selects("c1", "c2", why={**BOTH, "x2": "retry_superseded"}),
    )
    yield Story(
        "title_call",
        """Beside the work, the harness asked the model for a title of the session. Training on it would reward titles.
        The history does not hold it.""",
        [call("t1", said("Fix the parser"), purpose={"label": "auxiliary", "evidence": "title prompt"}), *TWO],
        output(message("one"), user(), message("two")),
        selects("c1", "c2", why={**BOTH, "t1": "not_returned"}),
    )
    yield Story(
        "subagent_not_returned",
        """A sub-agent did two turns of its own; the main history holds only what came back as a tool result. Its calls
        are no part of the returned history, whatever they are labelled.""",
        [
            call("c1", tools(tool_call("t1", "task", '{"do":"search"}'))),
            call("s1", said("searching"), purpose={"label": "subagent", "evidence": "header"}),
            call("s2", said("found"), parent="s1", purpose={"label": "subagent", "evidence": "header"}),
            call("c2", said("It is in a.py."), parent="c1"),
        ],
        output(function_call("t1", "task", '{"do":"search"}'), tool_result("t1", "found"), message("It is in a.py.")),
        selects("c1", "c2", why={**BOTH, "s1": "not_returned", "s2": "not_returned"}),
    )
    yield Story(
        "subagent_returned_as_envelope",
        """Here the harness returns the sub-agent's transcript too, as an envelope of its own. Then its calls belong,
        and they make a row of their own.""",
        [
            call("c1", tools(tool_call("t1", "task"))),
            call("s1", said("found")),
            call("c2", said("Done."), parent="c1"),
        ],
        {
            "responses": [
                {"output": [message("found")]},
                {"output": [function_call("t1", "task"), tool_result("t1"), message("Done.")]},
            ],
            "reward": 1.0,
        },
        selects(
            "s1",
            "c1",
            "c2",
            why={**BOTH, "s1": "content"},
            rows=[["s1"], ["c1", "c2"]],
        ),
    )
    yield Story(
        "compaction",
        """The context got too long; the harness had the model summarise it and went on from the summary. The history
        holds the old turns, the marker and the new ones. The new conversation does not extend the old tokens: two
        rows. The summary itself was not returned, so it is context.""",
        [
            call("c1", said("one")),
            call("k1", said("Summary: one was done."), parent="c1"),
            call("c2", said("two")),
        ],
        output(message("one"), {"type": "compaction", "summary": "Summary: one was done."}, message("two")),
        selects("c1", "c2", why={**BOTH, "k1": "not_returned"}, rows=[["c1"], ["c2"]]),
    )
    yield Story(
        "drift_makes_two_rows",
        """The second prompt does not begin with the tokens of the call it continues, because the template dropped the
        old reasoning. Both calls are selected all the same; each becomes a row on exactly the context it saw.""",
        [
            call("c1", reasoning("Hm."), message("one")),
            call("c2", message("two"), parent="c1", drifts=True),
        ],
        output(reasoning("Hm."), message("one"), user(), message("two")),
        selects("c1", "c2", why=BOTH, rows=[["c1"], ["c2"]]),
    )
    yield Story(
        "branch_abandoned",
        """The harness went back to the first turn and took another way. The abandoned branch is not in the history;
        that its calls were good does not matter.""",
        [
            call("c1", said("one")),
            call("b1", said("wrong way"), parent="c1"),
            call("b2", said("dead end"), parent="b1"),
            call("c2", said("right way"), parent="c1"),
        ],
        output(message("one"), user(), message("right way")),
        selects("c1", "c2", why={**BOTH, "b1": "not_returned", "b2": "not_returned"}),
    )
    yield Story(
        "parallel_tool_turns",
        """Two calls of one turn were made side by side and committed in the other order. The history decides the order
        of the selection, not the commit.""",
        [
            call("c1", said("plan")),
            call("c3", said("second half"), parent="c1"),
            call("c2", said("first half"), parent="c1"),
        ],
        output(message("plan"), user(), message("first half"), user(), message("second half")),
        selects(
            "c1",
            "c2",
            "c3",
            why={**BOTH, "c3": "content"},
            rows=[["c1", "c2"], ["c3"]],
        ),
    )


def _envelopes() -> Iterator[Story]:
    yield Story(
        "one_envelope_per_turn",
        """The harness returns a response object for every turn, each with the id under which it was served: native
        envelopes. Each call has to stand in its own.""",
        TWO,
        {
            "responses": [
                {"id": "resp-c1", "output": [message("one")]},
                {"id": "resp-c2", "output": [message("two")]},
            ],
            "response": {"id": "resp-c2", "output": []},
            "reward": 1.0,
        },
        selects("c1", "c2", why={"c1": "response_id", "c2": "response_id"}),
    )
    yield Story(
        "native_envelopes_tell_equal_texts_apart",
        """Three calls said the same. The envelopes carry response ids, and each id names its call: no guess.""",
        [call("c1", said("ok")), call("c2", said("ok")), call("c3", said("ok"))],
        {
            "responses": [{"id": "resp-c3", "output": [message("ok")]}, {"id": "resp-c1", "output": [message("ok")]}],
            "reward": 1.0,
        },
        selects(
            "c3",
            "c1",
            why={"c1": "response_id", "c2": "not_returned", "c3": "response_id"},
            rows=[["c3"], ["c1"]],
        ),
    )
    yield Story(
        "native_envelope_with_other_content",
        """An envelope has the id of a captured call and the words of another. Identity constrains content and never
        overrides it: refused.""",
        TWO,
        {"responses": [{"id": "resp-c1", "output": [message("two")]}]},
        refuses("match_missing", "resp-c1", "c1", where="$.responses[0]"),
    )
    yield Story(
        "native_call_outside_its_envelope",
        """Both envelopes can be read, but the call that the second one names stands in neither of its places: its
        words are those of another call that fits as well. The envelope's own call has to be inside.""",
        [call("c1", said("one")), call("c2", said("two"), parent="c1"), call("c3", said("one"))],
        {
            "responses": [
                {"output": [message("one")]},
                {"id": "resp-c2", "output": [message("one")]},
            ],
        },
        refuses("match_missing", "resp-c2", "c2", where="$.responses[1]"),
    )
    yield Story(
        "envelope_empty",
        """An envelope names a captured call and holds only a user turn. The reply is missing, so nobody knows whether
        the harness got it.""",
        TWO,
        {"responses": [{"id": "resp-c1", "output": [message("one")]}, {"id": "resp-c2", "output": [user()]}]},
        refuses("envelope_empty", "resp-c2", where="$.responses[1]"),
    )
    yield Story(
        "envelope_without_authored_items",
        """An envelope that names no captured call and holds nothing of the model leaves no trace.""",
        TWO,
        {"responses": [{"id": "local-1", "output": [user()]}, {"output": [message("one"), user(), message("two")]}]},
        selects("c1", "c2", why=BOTH),
    )
    yield Story(
        "cumulative_envelopes",
        """Each envelope repeats the whole history before it. Read as it stands every call but the last would be
        trained twice; refused, and the refusal says that a call stands more than once.""",
        TWO,
        {"responses": [{"output": [message("one")]}, {"output": [message("one"), user(), message("two")]}]},
        refuses("selection_duplicated", "more than once"),
    )
    yield Story(
        "sessions_mixed",
        """Envelopes of two sessions in one result. Whose reward is it?""",
        TWO,
        {
            "responses": [
                {"metadata": {"session_id": "s1"}, "output": [message("one")]},
                {"metadata": {"session_id": "s2"}, "output": [message("two")]},
            ],
        },
        refuses("sessions_mixed", "s1", "s2", where="$.responses[1]"),
    )
    yield Story(
        "session_absent_on_one",
        """One envelope says its session, the next says none. Absence counts as a value, so they are mixed too.""",
        TWO,
        {
            "responses": [
                {"metadata": {"session_id": "s1"}, "output": [message("one")]},
                {"metadata": None, "output": [message("two")]},
            ],
        },
        refuses("sessions_mixed", "s1", where="$.responses[1]"),
    )
    yield Story(
        "output_missing",
        """The response has no list of items, as when a harness returns an error object.""",
        TWO,
        {"response": {"id": "resp-c2", "output": None, "error": "overloaded"}},
        refuses("output_missing", "null", where="$.response.output"),
    )
    yield Story(
        "nothing_returned",
        """The harness handed back a reward and nothing else. The returned history cannot be read from that; policy
        `final_context` is made for such harnesses.""",
        TWO,
        {"reward": 1.0},
        refuses("output_missing", "response"),
    )
    yield Story(
        "output_malformed_deep_inside",
        """A text part holds a number. The refusal names the path to it.""",
        TWO,
        output(message("one"), {"role": "assistant", "content": [{"type": "text", "text": 7}]}),
        refuses("output_malformed", "number", where="$.response.output[1].content[0].text"),
    )
    yield Story(
        "history_without_replies",
        """The history holds user turns only: no reply that could be trained came back.""",
        TWO,
        output(user(), user()),
        refuses("selection_empty"),
    )


def _snapshots() -> Iterator[Story]:
    yield Story(
        "snapshots_cumulative_by_id",
        """The output is a list of snapshots, each the whole history so far, with the item ids that were served. A
        known id is read once.""",
        [call("c1", message("one", id="m1")), call("c2", message("two", id="m2"), parent="c1")],
        output(
            [message("one", id="m1")],
            [message("one", id="m1"), user(), message("two", id="m2")],
            contains_transitions=None,
        )
        | {
            "response": {
                "contains_transitions": True,
                "output": [
                    [message("one", id="m1")],
                    [message("one", id="m1"), user(), message("two", id="m2")],
                ],
            }
        },
        selects("c1", "c2", why={"c1": "item_id", "c2": "item_id"}),
    )
    yield Story(
        "snapshots_cumulative_without_ids",
        """The same without ids. Each snapshot begins with all of the one before. Kept twice there is no reading, with
        repeats skipped there is one: that decides.""",
        TWO,
        {
            "response": {
                "contains_transitions": True,
                "output": [[user(), message("one")], [user(), message("one"), user(), message("two")]],
            }
        },
        selects("c1", "c2", why=BOTH),
    )
    yield Story(
        "snapshots_not_cumulative",
        """Each snapshot holds only what is new. Flattened in order.""",
        TWO,
        {"response": {"contains_transitions": True, "output": [[message("one")], [user(), message("two")]]}},
        selects("c1", "c2", why=BOTH),
    )
    yield Story(
        "snapshot_item_conflict",
        """Two snapshots hold one item id with two contents: something was edited between them.""",
        [call("c1", message("one", id="m1"))],
        {
            "response": {
                "contains_transitions": True,
                "output": [[message("one", id="m1")], [message("ONE", id="m1")]],
            }
        },
        refuses("snapshot_item_conflict", "m1", where="$.response.output[1][0]"),
    )
    yield Story(
        "snapshot_ambiguous",
        """The second snapshot begins with the first. Two captured calls said the same, so the repeat may be a repeat or
        the second call's own reply: one set of calls or the other. Refused, both readings shown.""",
        [call("c1", said("ok")), call("c2", said("ok"), tokens_of="c1")],
        {"response": {"contains_transitions": True, "output": [[message("ok")], [message("ok")]]}},
        refuses("snapshot_ambiguous", "skipping", "keeping"),
    )
    yield Story(
        "snapshot_not_a_list",
        """The output says that it holds snapshots, and one of them is an object.""",
        TWO,
        {"response": {"contains_transitions": True, "output": [[message("one")], message("two")]}},
        refuses("output_malformed", "array", where="$.response.output[1]"),
    )


def _spans() -> Iterator[Story]:
    yield Story(
        "one_call_over_several_items",
        """One reply came back as reasoning, two messages and a tool call. A call may span several items.""",
        [call("c1", reasoning("Hm."), message("a"), message("b"), function_call("t1", "ls"))],
        output(reasoning("Hm."), message("a"), message("b"), function_call("t1", "ls")),
        selects("c1", why={"c1": "content"}),
    )
    yield Story(
        "boundary_inside_an_item",
        """Two replies were glued together into one message. A call's boundary never lies inside an item: which tokens
        would its text be?""",
        TWO,
        output(message("onetwo")),
        refuses("match_missing", "onetwo", where="$.response.output[0]"),
    )
    yield Story(
        "call_across_a_user_turn",
        """One call served two messages; in the history a user turn stands between them. No reply contains a user turn:
        a bound.""",
        [call("c1", message("a"), message("b"))],
        output(message("a"), user(), message("b")),
        refuses("match_missing", "call_incomplete", "c1", where="$.response.output[0]"),
    )
    yield Story(
        "interleaved_bounds",
        """The history interleaves two replies with user turns so that, bounds ignored, one call with two messages would
        explain the middle. A user turn strictly inside forbids that; the two single calls explain it. NVIDIA's module
        looks for bounds at the ends only.""",
        [
            call("c1", message("a"), message("b")),
            call("c2", said("a")),
            call("c3", said("b"), parent="c2"),
        ],
        output(message("a"), user(), message("b")),
        selects("c2", "c3", why={"c1": "not_returned", "c2": "content", "c3": "content"}),
    )
    yield Story(
        "tool_result_is_no_bound",
        """A result stands inside one reply's items, as with tools that answer while the reply goes on. A tool result
        between two items does not cut the call.""",
        [call("c1", function_call("t1", "ls"), function_call("t2", "pwd"))],
        output(function_call("t1", "ls"), tool_result("t1"), function_call("t2", "pwd"), tool_result("t2")),
        selects("c1", why={"c1": "content"}),
    )
    yield Story(
        "call_across_envelopes",
        """The two halves of one reply came in two envelopes. An envelope's end is a border like a bound.""",
        [call("c1", message("a"), message("b"))],
        {"responses": [{"output": [message("a")]}, {"output": [message("b")]}]},
        refuses("match_missing", "c1", where="$.responses[0].output[0]"),
    )


def _misses() -> Iterator[Story]:
    def miss(name: str, told: str, captured: list, returned: list, *mentions: str, at: int = 0) -> Story:
        where = f"$.response.output[{at}]"
        return Story(
            name, told, [call("c1", *captured)], output(*returned), refuses("match_missing", *mentions, where=where)
        )

    yield miss(
        "text_edited",
        """The harness corrected one letter of a reply.""",
        [said("The answer is four.")],
        [message("The answer is Four.")],
        "text_edited",
        "c1",
        "item_index",
    )
    yield miss(
        "whitespace_stripped",
        """The harness stripped the reply. By default a blank is content: it was sampled. The refusal says that only
        whitespace differs, and `whitespace=trim` would settle it.""",
        [said("The answer is four.\n")],
        [message("The answer is four.")],
        "whitespace_only",
    )
    yield miss(
        "reply_incomplete",
        """Only the first half of the reply is in the history: the message without its tool call.""",
        [message("Looking."), function_call("t1", "ls")],
        [message("Looking."), user()],
        "call_incomplete",
        "ls",
    )
    yield miss(
        "order_changed",
        """The two tool calls of one reply came back in the other order. They were sampled in one order only.""",
        [function_call("t1", "ls"), function_call("t2", "pwd")],
        [function_call("t2", "pwd"), function_call("t1", "ls")],
        "order_changed",
    )
    yield miss(
        "not_captured",
        """A reply is in the history that nothing captured resembles: it came from a model behind no gateway.""",
        [said("one")],
        [message("one"), user(), message("I never went through the gateway, dear reader.")],
        "not_captured",
        at=2,
    )
    yield Story(
        "call_repeated_in_history",
        """One captured call, returned twice. Only a call that may repeat explains it.""",
        [call("c1", said("one"))],
        output(message("one"), user(), message("one")),
        refuses("selection_duplicated"),
    )


def _ambiguities() -> Iterator[Story]:
    yield Story(
        "two_readings",
        """A retry said exactly the same, with other log-probabilities. One of the two was returned and nothing says
        which. A greedy matcher takes the first; here both readings are shown with what would settle it.""",
        [
            call("c1", said("one")),
            call("x2", said("two"), parent="c1"),
            call("c2", said("two"), parent="c1", same_prompt_as="x2"),
        ],
        output(message("one"), user(), message("two")),
        refuses("match_ambiguous", "x2", "c2", "readings", "item ids", where="$.response.output[2]"),
    )
    yield Story(
        "interchangeable_twins",
        """Two parallel requests sampled the same tokens with the same log-probabilities, parent, model and weights.
        It makes no difference which one is trained: the smaller id stands for both, noted.""",
        [
            call("c1", said("one")),
            call("c3", said("two"), parent="c1"),
            call("c2", said("two"), parent="c1", tokens_of="c3"),
        ],
        output(message("one"), user(), message("two")),
        selects(
            "c1",
            "c2",
            why={"c1": "content", "c2": "interchangeable", "c3": "retry_superseded"},
            notes=["call c2 stands for the interchangeable c3"],
        ),
    )
    yield Story(
        "lineage_tells_equal_texts_apart",
        """Two calls said the same. One of them is the recorded parent of a reply that is certainly in the history; so
        it is the one that was returned.""",
        [
            call("x1", said("ok")),
            call("c1", said("ok")),
            call("c2", said("done"), parent="c1"),
        ],
        output(message("ok"), user(), message("done")),
        selects("c1", "c2", why={"x1": "not_returned", "c1": "lineage", "c2": "content"}),
    )
    yield Story(
        "candidate_link_is_no_evidence",
        """A rejected retry continues one of two equal calls. Its link proves nothing, because the retry itself is not
        in the history: still ambiguous.""",
        [
            call("c1", said("ok")),
            call("c2", said("ok")),
            call("x3", said("rejected"), parent="c2"),
        ],
        output(message("ok")),
        refuses("match_ambiguous", "c1", "c2", where="$.response.output[0]"),
    )
    yield Story(
        "equal_texts_all_returned",
        """Three calls said `ok` and all three came back. Whatever the order, the set of calls is the same, and the
        scored id names the last. They stand in commit order.""",
        [call("c1", said("ok")), call("c2", said("ok"), parent="c1"), call("c3", said("ok"), parent="c2")],
        output(message("ok"), user(), message("ok"), user(), message("ok"), response_id="resp-c3"),
        selects(
            "c1",
            "c2",
            "c3",
            why={"c1": "content", "c2": "content", "c3": "response_id"},
        ),
    )
    yield Story(
        "last_call_uncertain",
        """Two unrelated calls said the same and both came back, but nothing says which one came last. The set is
        certain and the scored call is not: refused.""",
        [call("c1", said("ok")), call("c2", said("ok"))],
        output(message("ok"), user(), message("ok")),
        refuses("terminal_unattributed"),
    )
    yield Story(
        "ancestor_after_descendant",
        """The history puts a reply before the one that it continues. That order never happened, so the transcript was
        rearranged: refused. NVIDIA's module selects it.""",
        TWO,
        output(message("two"), user(), message("one")),
        refuses("lineage_contradiction"),
    )
    yield Story(
        "search_too_long",
        """Fourteen replies of two equal lines, two of three, and three blocks of nine lines. Each block needs a
        reply of three lines, and there are two: no reading exists. Proving it means trying every arrangement of the
        others, which takes more steps than the budget: undecided, never a guess.""",
        [
            *(call(f"c{number:02}", message("-"), message("-")) for number in range(14)),
            *(call(f"d{number}", message("-"), message("-"), message("-")) for number in range(2)),
        ],
        output(*([message("-")] * 9 + [user()]) * 3),
        refuses("match_undecided", "steps"),
    )
