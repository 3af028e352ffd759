"""Stories about the options of `returned_history`: each with and without (selection page, section 3, options)."""

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
    tool_call,
    tool_result,
    tools,
    user,
)

BOTH = {"c1": "content", "c2": "content"}


def stories() -> Iterator[Story]:
    """Tell the stories of this file."""
    yield from _reasoning()
    yield from _whitespace()
    yield from _renamed()
    yield from _unmatched()


def _reasoning() -> Iterator[Story]:
    calls = [
        call("c1", reasoning("First, look."), function_call("t1", "ls")),
        call("c2", reasoning("Now answer."), message("Done."), parent="c1"),
    ]
    history = output(function_call("t1", "ls"), tool_result("t1"), reasoning("Now answer."), message("Done."))
    told = """The harness dropped the reasoning of the first turn and kept that of the last."""
    yield Story(
        "reasoning_optional_off",
        f"{told} Without the option that is a changed reply.",
        calls,
        history,
        refuses("match_missing", "reasoning_missing", where="$.response.output[0]"),
    )
    yield Story(
        "reasoning_optional",
        f"""{told} With `reasoning=optional` a call may match without its reasoning, all of it or none. What is trained
        is what was captured, reasoning included; the notes say that the option was in force.""",
        calls,
        history,
        selects("c1", "c2", why=BOTH, options={"reasoning": "optional"}, notes=["option reasoning=optional"]),
    )
    yield Story(
        "reasoning_optional_not_half",
        """Half of the reasoning was cut. The option lets all of it go, never a part: the rest was edited.""",
        [call("c1", reasoning("First, look."), reasoning("Then think."), message("Done."))],
        output(reasoning("First, look."), message("Done.")),
        refuses("match_missing", "reasoning", where="$.response.output[0]", options={"reasoning": "optional"}),
    )
    yield Story(
        "reasoning_optional_needs_another_atom",
        """A call that is nothing but reasoning cannot stand where nothing is.""",
        [call("c1", reasoning("Hm.")), call("c2", said("4"), parent="c1")],
        output(message(""), user(), message("4")),
        refuses("match_missing", where="$.response.output[0]", options={"reasoning": "optional"}),
    )


def _whitespace() -> Iterator[Story]:
    calls = [call("c1", said("\n\nThe answer is four.  "))]
    history = output(message("The answer is four."))
    yield Story(
        "whitespace_trim_off",
        """The harness stripped the text. Without the option blanks count.""",
        calls,
        history,
        refuses("match_missing", "whitespace_only", where="$.response.output[0]"),
    )
    yield Story(
        "whitespace_trim",
        """With `whitespace=trim` texts are compared without leading and trailing whitespace; the captured tokens, with
        their blanks, are trained.""",
        calls,
        history,
        selects("c1", why={"c1": "content"}, options={"whitespace": "trim"}, notes=["option whitespace=trim"]),
    )
    yield Story(
        "whitespace_trim_inner",
        """Blanks inside the text still count.""",
        calls,
        output(message("The answer  is four.")),
        refuses("match_missing", "whitespace_only", where="$.response.output[0]", options={"whitespace": "trim"}),
    )
    bare: Json = {"kind": "text", "fingerprint": "00" * 32}
    yield Story(
        "atoms_unavailable",
        """The records of another system carry fingerprints and no text. They can be matched as they are, but an option
        that compares text in another form needs the text.""",
        [call("c1", bare)],
        output(message("4")),
        refuses("atoms_unavailable", "c1", where="call=c1", options={"whitespace": "trim"}),
    )


def _renamed() -> Iterator[Story]:
    calls = [
        call("c1", tools(tool_call("srv_1", "ls", '{"p":"a"}'))),
        call("c2", tools(tool_call("srv_2", "ls", '{"p":"b"}')), parent="c1"),
    ]
    history = output(function_call("h1", "ls", '{"p":"a"}'), tool_result("h1"), function_call("h2", "ls", '{"p":"b"}'))
    yield Story(
        "tool_call_ids_renamed_off",
        """The harness gives every tool call an id of its own. Without the option the ids count.""",
        calls,
        history,
        refuses("match_missing", "call_id_changed", where="$.response.output[0]"),
    )
    yield Story(
        "tool_call_ids_renamed",
        """With `tool_call_ids=renamed` a returned id stands for the captured one that name, arguments and place leave,
        one to one over the history.""",
        calls,
        history,
        selects("c1", "c2", why=BOTH, options={"tool_call_ids": "renamed"}, notes=["option tool_call_ids=renamed"]),
    )
    yield Story(
        "tool_call_ids_renamed_not_one_to_one",
        """The history uses one id for two calls whose captured ids differ. One to one it cannot be.""",
        calls,
        output(function_call("h1", "ls", '{"p":"a"}'), tool_result("h1"), function_call("h1", "ls", '{"p":"b"}')),
        refuses(
            "match_missing", "h1", "one to one", where="$.response.output[0]", options={"tool_call_ids": "renamed"}
        ),
    )
    yield Story(
        "tool_call_ids_renamed_captured_id_stands",
        """A returned id that was captured stands for itself, even under the option: here it belongs to the other
        call.""",
        calls,
        output(function_call("srv_2", "ls", '{"p":"a"}')),
        refuses("match_missing", "srv_2", where="$.response.output[0]", options={"tool_call_ids": "renamed"}),
    )


def _unmatched() -> Iterator[Story]:
    calls = [call("c1", said("one")), call("c2", said("two"), parent="c1")]
    history = output(message("Hello, I am a greeting of the harness."), user(), message("one"), user(), message("two"))
    yield Story(
        "unmatched_context_off",
        """The harness opens every transcript with a canned reply that no model made. Without the option it is an
        unexplained reply.""",
        calls,
        history,
        refuses("match_missing", "greeting", where="$.response.output[0]"),
    )
    yield Story(
        "unmatched_context",
        """With `unmatched=context` a run between bounds in which nothing matches is context, as a whole. The notes
        name it.""",
        calls,
        history,
        selects("c1", "c2", why=BOTH, options={"unmatched": "context"}, notes=["match no call: context"]),
    )
    yield Story(
        "unmatched_context_not_the_last",
        """The unmatched run is the last one: the scored reply itself. It is never passed over.""",
        calls,
        output(message("one"), user(), message("Bye, says the harness.")),
        refuses("match_missing", "Bye", where="$.response.output[2]", options={"unmatched": "context"}),
    )
    yield Story(
        "unmatched_context_as_a_whole",
        """The run holds a known reply beside the unknown one. A run is context as a whole or not at all.""",
        calls,
        output(message("one"), message("Hello."), user(), message("two")),
        refuses("match_missing", "Hello", where="$.response.output[1]", options={"unmatched": "context"}),
    )
