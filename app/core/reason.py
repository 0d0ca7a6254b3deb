"""Reasons, sent between processes as a code with values. Logs, terminal and programs get these English texts; web
pages translate a reason with the catalogs' text `reason.<code>`."""

from collections.abc import Mapping
from dataclasses import dataclass, field

REASONS = {
    # no drafts
    "asked": "the request switched drafting off",
    "policy_off": "drafting is off for this model (policy 'off')",
    "batched": "other requests are running, and policy 'single' drafts only when one runs",
    "drafters": "{detail}",
    "missing_some": "{names} is not on this computer; the other chosen drafters were used",
    "missing_all": "{names} is not on this computer; no other chosen drafter could be used",
    "no_drafter": "no drafter is loaded with this model",
    "measuring": "measuring the cost of a plain step",
    "plain": "plain decoding is faster: {method} with draft length {count:g} costs {ratio:.1f}x a plain step,"
    " acceptance {share:.2f}",
    "no_match": "no n-gram match",
    "last_token": "only one token was left",
    "under_way": "a plain forward was already under way",
    "strict_first": "'strict' draws the first token without drafts",
    "slow_masks": "the grammar's masks take too long for drafts",
    "drafter_full": "the drafter's context is full",
    "drafter_unread": "the drafter has not read the prompt",
    "drafter_reads": "the drafter was still reading the text",
    "drafter_waits": "the hidden states of the last tokens are not available yet",
    # a method that cannot draft for a model
    "not_chosen": "this model's settings allow only {methods} to draft",
    "not_loaded": "no {drafter} is loaded with this model: pass one with `--draft` or `draft_model`",
    "cannot_draft": "{detail}",
    # the end of a worker
    "exit_killed": "killed (SIGKILL), usually out of memory",
    "exit_aborted": "aborted (SIGABRT): a fatal error in the native libraries, see the log",
    "exit_segfault": "crashed (SIGSEGV): a memory error in the native libraries, see the log",
    "exit_bus": "crashed (SIGBUS): a model file changed or its disk went away while in use",
    "exit_illegal": "crashed (SIGILL): the processor lacks an instruction that the libraries use",
    "exit_terminated": "terminated (SIGTERM)",
    "exit_signal": "ended by signal {name}",
    "exit_clean": "exited with code 0",
    "exit_code": "exited with code {code}, see the log",
    "exit_device": "the GPU accepted no more work from the process, so a new process was started",
    "exit_stuck": "closed its channel and did not exit",
    "exit_not_started": "could not be started ({detail})",
    "exit_not_ready": "did not become ready within {seconds:g} s",
    "exit_hung": "hung: no heartbeat for {seconds:.3g} s while work was pending",
    "exit_channel": "lost its channel ({detail})",
    "exit_unwatched": "the supervisor failed ({detail})",
    "exit_stopped": "stopped with the server (exit code {code})",
    "exit_restarted": "restarted on request (exit code {code})",
    # a quarantined model
    "quarantined": "the worker ended {count:g} times within {minutes:g} minutes while it ran this model, the last time:"
    " {cause}; it may run again in {again} min",
}


@dataclass(frozen=True, slots=True)
class Reason:
    """A code of `REASONS` and the values that fill its text; false when there is nothing to explain."""

    code: str = ""
    values: Mapping[str, str | float] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.code)

    def __str__(self) -> str:
        return REASONS[self.code].format(**self.values) if self.code else ""


NO_REASON = Reason()
DRAFTER_READS = Reason("drafter_reads")
"""Reason for drafts that are still to come: it says nothing about the drafter."""


def reason_object(reason: Reason) -> dict[str, object]:
    """Return a reason as JSON: its text for programs, its code and values for web pages."""
    return {"reason": str(reason), "reason_code": reason.code, "reason_values": dict(reason.values)}
