"""Stories about the other policies and about what the pipeline checks after any policy (sections 1 and 4 to 7)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.corpus.telling import (
    Json,
    Story,
    call,
    lost,
    message,
    output,
    refuses,
    said,
    selects,
    user,
)

BOTH = {"c1": "content", "c2": "content"}
TWO = (call("c1", said("one")), call("c2", said("two"), parent="c1"))


def stories() -> Iterator[Story]:
    """Tell the stories of this file."""
    yield from _all_captured()
    yield from _final_context()
    yield from _labels()
    yield from _custom()
    yield from _completion()
    yield from _lost()
    yield from _tokens()


def _all_captured() -> Iterator[Story]:
    def kept(name: str, told: str, calls: list[Json], result: Json, *selected: str, **more: Any) -> Story:
        return Story(name, told, calls, result, selects(*selected, policy="all_captured", **more))

    captured = {"c1": "captured", "c2": "captured"}
    yield kept(
        "all_captured",
        """Every finished call is kept in commit order, whatever was returned, the title call too: this policy asks
        no question. The scored call is named by its response id.""",
        [call("t1", said("A title"), purpose={"label": "auxiliary", "evidence": "title prompt"}), *TWO],
        output(message("two"), response_id="resp-c2"),
        "t1",
        "c1",
        "c2",
        why={"t1": "captured", **captured},
        rows=[["t1"], ["c1", "c2"]],
        notes=["labelled auxiliary: t1"],
    )
    yield kept(
        "all_captured_unfinished_leaf",
        """A call was aborted by the harness and nothing continues it. It is left out, with its reason. An abort is not
        a finished call even where its status says completed; NVIDIA's module keeps it.""",
        [*TWO, call("x3", said("thr"), parent="c2", finish_reason="abort")],
        output(message("two"), response_id="resp-c2"),
        "c1",
        "c2",
        why={**captured, "x3": "unfinished_leaf"},
    )
    yield Story(
        "all_captured_unfinished_parent",
        """A failed call is the parent of a finished one. Hiding it would train a reply on a context that was never
        finished: it stays and refuses the rollout.""",
        [call("c1", said("on"), response_status="failed", finish_reason=None), call("c2", said("two"), parent="c1")],
        output(message("two"), response_id="resp-c2"),
        refuses("selected_call_failed", "c1", "failed", where="call=c1", policy="all_captured"),
    )
    yield kept(
        "all_captured_terminal_by_content",
        """No id was kept. The content of the scored response equals one call's output: that is the witness.""",
        list(TWO),
        output(message("two")),
        "c1",
        "c2",
        why=captured,
        notes=["content: equals one call's output"],
    )
    yield Story(
        "all_captured_terminal_unattributed",
        """The scored response equals no call's output and has no known id. No witness, no scored call.""",
        TWO,
        output(message("three")),
        refuses("terminal_unattributed", "equals no call's output", policy="all_captured"),
    )
    yield Story(
        "witness_disagreement",
        """The id names one call and the content is another's. A contradiction attributes nothing.""",
        TWO,
        output(message("one"), response_id="resp-c2"),
        refuses("witness_disagreement", "response_id", "content", policy="all_captured"),
    )
    yield Story(
        "declared_miss_stops_everything",
        """The harness declares a response id that was never captured. It is wrong about its own work, so the good
        content witness is not asked to overrule it.""",
        TWO,
        output(message("two"), terminal_response_id="resp-c9"),
        refuses("terminal_unattributed", "resp-c9", policy="all_captured"),
    )


def _final_context() -> Iterator[Story]:
    chain = {"c1": "ancestor_of_terminal", "c2": "ancestor_of_terminal"}
    yield Story(
        "final_context_from_a_reward",
        """The harness returns a number and nothing else. The one conversation that was continued has one end: the
        lineage walk finds it, and its ancestors with it. The title call was never continued.""",
        [call("t1", said("A title")), *TWO],
        {"reward": 1.0},
        selects("c1", "c2", why={"t1": "not_in_final_context", **chain}, policy="final_context"),
    )
    yield Story(
        "final_context_with_an_id",
        """The scored id is known, so no walk is needed; the retry beside it is not in its context.""",
        [call("c1", said("one")), call("x2", said("zwei"), parent="c1"), call("c2", said("two"), parent="c1")],
        {"response": {"id": "resp-c2", "output": [message("two")]}, "reward": 1.0},
        selects("c1", "c2", why={**chain, "x2": "not_in_final_context"}, policy="final_context"),
    )
    yield Story(
        "final_context_two_ends",
        """Two branches of one conversation are equally long and nothing is returned: a tie refuses.""",
        [call("c1", said("one")), call("c2", said("two"), parent="c1"), call("c3", said("three"), parent="c1")],
        {"reward": 1.0},
        refuses("terminal_unattributed", "several calls", policy="final_context"),
    )
    yield Story(
        "final_context_descendants_beat_a_sibling",
        """A childless retry stands beside a call that was continued. A child with descendants beats it.""",
        [
            call("c1", said("one")),
            call("x2", said("zwei"), parent="c1"),
            call("c2", said("two"), parent="c1", same_prompt_as="x2"),
            call("c3", said("three"), parent="c2"),
        ],
        {"reward": 1.0},
        selects(
            "c1",
            "c2",
            "c3",
            why={**chain, "c3": "ancestor_of_terminal", "x2": "retry_superseded"},
            policy="final_context",
        ),
    )
    yield Story(
        "final_context_lineage_broken",
        """The scored call continues a call that was not captured.""",
        [call("c2", said("two"), parent="c1")],
        {"response": {"id": "resp-c2", "output": [message("two")]}},
        refuses("lineage_broken", "c2", where="call=c2", policy="final_context"),
    )


def _labels() -> Iterator[Story]:
    def labelled(call_id: str, text: str, label: str, parent: str | None = None, **fields: Any) -> Json:
        return call(call_id, said(text), parent=parent, purpose={"label": label, "evidence": "header"}, **fields)

    misled = [
        labelled("c1", "one", "auxiliary"),
        labelled("c2", "two", "compaction", "c1"),
        labelled("c3", "three", "subagent", "c2"),
        labelled("t1", "A title", "agent"),
    ]
    history = output(message("one"), user(), message("two"), user(), message("three"), response_id="resp-c3")
    returned = dict.fromkeys(("c1", "c2", "c3"), "content")
    yield Story(
        "labels_never_filter",
        """Every label is wrong: the agent's own turns are called a title, a compaction and a subagent, and the title
        the agent. What the harness returned decides, and nobody looks at a label.""",
        misled,
        history,
        selects("c1", "c2", "c3", why={**returned, "c3": "response_id", "t1": "not_returned"}),
    )
    yield Story(
        "labels_never_filter_captured_calls",
        """The same labels under the policy that keeps every finished call. It keeps them all, and tells what is said of
        them, so that a person can look.""",
        misled,
        history,
        selects(
            "c1",
            "c2",
            "c3",
            "t1",
            why=dict.fromkeys(("c1", "c2", "c3", "t1"), "captured"),
            rows=[["c1", "c2", "c3"], ["t1"]],
            terminal="resp-c3",
            policy="all_captured",
            notes=["labelled auxiliary: c1", "labelled compaction: c2", "labelled subagent: c3"],
        ),
    )
    yield Story(
        "labels_never_filter_context",
        """The same labels where the scored call's context is trained: its ancestors, whatever they are called.""",
        misled,
        history,
        selects(
            "c1",
            "c2",
            "c3",
            why={**dict.fromkeys(("c1", "c2", "c3"), "ancestor_of_terminal"), "t1": "not_in_final_context"},
            policy="final_context",
        ),
    )
    yield Story(
        "retry_of_is_no_verdict",
        """The gateway saw that the second call repeats the first one's request, and took it for the retry. The history
        holds the first reply: the harness had received it after all.""",
        [
            call("c1", said("one"), request_digest="d", delivery="partial"),
            call("x1", said("eins"), same_prompt_as="c1", request_digest="d", retry_of="c1", delivery="delivered"),
            call("c2", said("two"), parent="c1"),
        ],
        output(message("one"), user(), message("two")),
        selects("c1", "c2", why={**BOTH, "x1": "retry_superseded"}),
    )


def _custom() -> Iterator[Story]:
    own = "tests.corpus.policies:"
    yield Story(
        "custom_policy",
        """Somebody's own function, named package.module:function, keeps the first call. Every other call gets a verdict
        all the same.""",
        TWO,
        output(message("one"), user(), message("two")),
        selects("c1", why={"c1": "captured", "c2": "policy_excluded"}, policy=own + "first_call"),
    )
    yield Story(
        "custom_policy_breaks_contract",
        """A policy selects one call twice; trained twice, it would weigh double.""",
        TWO,
        {},
        refuses(
            "policy_broke_contract",
            "c1",
            "twice",
            where="policy=tests.corpus.policies:same_call_twice",
            policy=own + "same_call_twice",
        ),
    )
    yield Story(
        "custom_policy_refuses",
        """A policy raises a plain ValueError: a refusal in its own words.""",
        TWO,
        {},
        refuses("policy_refused", "of no use to me", policy=own + "no_good_rollouts"),
    )


def _completion() -> Iterator[Story]:
    history = output(message("one"), user(), message("two"))

    def last(name: str, told: str, expect: Json, **fields: Any) -> Story:
        return Story(name, told, [TWO[0], call("c2", said("two"), parent="c1", **fields)], history, expect)

    yield last(
        "length_stop",
        """The last reply hit its token limit. It is trained, and the rollout is marked truncated.""",
        selects("c1", "c2", why=BOTH, truncated=True),
        response_status="incomplete",
        finish_reason="length",
    )
    yield last(
        "status_from_a_known_reason",
        """The engine says no status and a reason that it is known for: a status follows from it.""",
        selects("c1", "c2", why=BOTH),
        response_status=None,
        finish_reason="tool_calls",
    )
    yield last(
        "completion_unknown",
        """Neither status nor reason: nothing says that the reply is whole, and silence is no evidence.""",
        refuses("completion_unknown", "c2", where="call=c2"),
        response_status=None,
        finish_reason=None,
    )
    yield last(
        "incomplete_without_reason",
        """Incomplete, and nobody says why.""",
        refuses("completion_unknown", "incomplete", where="call=c2"),
        response_status="incomplete",
        finish_reason=None,
    )
    yield last(
        "selected_call_aborted",
        """The harness kept the text of a generation that it aborted itself.""",
        refuses("selected_call_failed", "abort", where="call=c2"),
        finish_reason="abort",
    )
    yield last(
        "content_filter",
        """The reply was cut by a content filter: incomplete, for a reason outside the length family.""",
        refuses("selected_call_failed", "content_filter", where="call=c2"),
        response_status="incomplete",
        finish_reason="content_filter",
    )
    yield last(
        "selected_call_failed",
        """The engine reported a failure after the text.""",
        refuses("selected_call_failed", "failed", where="call=c2"),
        response_status="failed",
        finish_reason=None,
    )


def _lost() -> Iterator[Story]:
    history = output(message("one"), user(), message("two"))
    yield Story(
        "lost_sibling_is_counted",
        """A parallel call was admitted by our own gateway and never finished. The harness cannot have received it, and
        nothing selected continues it: counted, not fatal.""",
        [*TWO, lost("l1", parent="c1")],
        history,
        selects("c1", "c2", why={**BOTH, "l1": "lost"}),
    )
    yield Story(
        "lost_call_maybe_received",
        """An imported capture has a hole and cannot say whether the harness got that reply. It may be the one that
        counts.""",
        [*TWO, lost("l1", maybe_received=True)],
        history,
        refuses("capture_incomplete", "l1", "received", where="call=l1"),
    )
    hole = [call("c1", said("one")), lost("l1", parent="c1"), call("c2", said("two"), parent="l1")]
    yield Story(
        "lost_ancestor",
        """A kept call continues one that was lost.""",
        hole,
        output(message("two"), response_id="resp-c2"),
        refuses("capture_incomplete", "l1", "ancestor", where="call=l1", policy="all_captured"),
    )
    yield Story(
        "lost_ancestor_of_a_returned_call",
        """The same under `returned_history`: the policy needs the ancestors of proven calls itself, and refuses
        first.""",
        hole,
        history,
        refuses("lineage_broken", "l1", where="call=c2"),
    )
    yield Story(
        "lost_call_and_unresolved_parent",
        """A call was lost, and a selected call's parent could not be resolved: the lost one may be it.""",
        [TWO[0], call("c2", said("two"), parent_resolution="unresolved"), lost("l1")],
        history,
        refuses("capture_incomplete", "l1", "unresolved", where="call=l1"),
    )


def _tokens() -> Iterator[Story]:
    history = output(message("one"), user(), message("two"))
    yield Story(
        "tokens_unusable",
        """The engine gave no log-probabilities for a returned call. There is no guess and no re-tokenising: the rollout
        is refused with the call's own reason.""",
        [TWO[0], call("c2", said("two"), parent="c1", generation_log_probs=None)],
        history,
        refuses("tokens_unusable", "logprobs_missing", where="call=c2", verdicts={"c2": "unusable_tokens"}),
    )
    yield Story(
        "tokens_unusable_and_not_selected",
        """A call without tokens that was not returned does no harm.""",
        [*TWO, call("x3", said("three"), parent="c2", generation_token_ids=None, generation_log_probs=None)],
        history,
        selects("c1", "c2", why={**BOTH, "x3": "not_returned"}),
    )
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    yield Story(
        "media_missing",
        """The request carried an image, and the record does not say where its tokens stand in the prompt. Rows could
        not be joined safely.""",
        [
            TWO[0],
            call(
                "c2",
                said("two"),
                parent="c1",
                request={"messages": [{"role": "user", "content": [image]}]},
            ),
        ],
        history,
        refuses("media_missing", "c2", where="call=c2"),
    )
    mixed = [TWO[0], call("c2", said("two"), parent="c1", model="judge")]
    yield Story(
        "models_mixed",
        """Two models wrote the returned history. Which one is to be trained has to be said.""",
        mixed,
        history,
        refuses("models_mixed", "policy", "judge"),
    )
    yield Story(
        "foreign_model",
        """The same with `train_model`: the other model's call becomes context, with that verdict.""",
        mixed,
        history,
        selects(
            "c1",
            terminal="resp-c2",
            why={"c1": "content", "c2": "foreign_model"},
            train_model="policy",
        ),
    )
    yield Story(
        "no_call_of_the_trained_model",
        """Nothing selected comes from the model that is to be trained.""",
        mixed,
        history,
        refuses("nothing_to_train", "student", train_model="student"),
    )
    yield Story(
        "empty_generation_set_aside",
        """A returned reply sampled no token at all. It makes no row and is reported; the other call is trained.""",
        [call("c1", said("one")), call("c2", said(""), parent="c1", samples=0)],
        output(message("one"), user(), message("")),
        selects("c1", "c2", why=BOTH, rows=[["c1"]], empty=["c2"]),
    )
    yield Story(
        "nothing_to_train",
        """Every returned reply is empty.""",
        [call("c1", said(""), samples=0)],
        output(message("")),
        refuses("nothing_to_train"),
    )
