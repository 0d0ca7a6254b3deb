"""An index of every stretch of some texts that answers: what followed this context most often?

A suffix automaton (Blumer et al. 1985) that grows token by token, in amortised constant time; several texts may share
one. Each state is a class of contexts that end at the same places. It counts the tokens that followed there, up to
contexts of `longest` tokens, as in SuffixDecoding (arXiv 2411.04975), so a token costs at most `longest` additions.
"""

from collections.abc import Iterable
from typing import NamedTuple

NOTHING = -1


class Context(NamedTuple):
    """The state that holds a context, and how many tokens of it are meant: a state holds its suffixes too."""

    state: int = 0
    size: int = 0


class Suffixes:
    """Contexts of `shortest` … `longest` tokens of all texts that were begun and extended."""

    def __init__(self, *, shortest: int, longest: int) -> None:
        self._shortest = shortest
        self._longest = longest
        self._lengths: list[int] = []
        self._links: list[int] = []
        self._edges: list[dict[int, int]] = []
        self._counts: list[dict[int, int]] = []
        self._favourites: list[int] = []
        self._last = self._new(0)
        self.end = Context()
        """The last `longest` tokens of the current text."""
        self.tokens = 0
        """How many were indexed."""

    def _new(self, length: int) -> int:
        self._lengths.append(length)
        self._links.append(NOTHING)
        self._edges.append({})
        self._counts.append({})
        self._favourites.append(NOTHING)
        return len(self._lengths) - 1

    def begin(self) -> None:
        """The next token starts another text."""
        self._last, self.end = 0, Context()

    def extend(self, tokens: Iterable[int]) -> None:
        """Go on with the current text."""
        for token in tokens:
            self._count(token)
            self._add(token)
            self.end = self._step(self._settle(self.end), token)
            self.tokens += 1

    def _count(self, token: int) -> None:
        """`token` follows every context that ends here; of equally frequent ones the latest is the favourite."""
        state = self.end.state
        while self._lengths[state] >= self._shortest:
            counts = self._counts[state]
            counts[token] = counts.get(token, 0) + 1
            if counts[token] >= counts.get(self._favourites[state], 0):
                self._favourites[state] = token
            state = self._links[state]

    def _add(self, token: int) -> None:
        """The automaton's own step; a text that repeats an earlier one from its start finds its states there."""
        last = self._last
        if token in self._edges[last]:
            self._last = self._reach(last, token)
            return
        new = self._last = self._new(self._lengths[last] + 1)
        while last != NOTHING and token not in self._edges[last]:
            self._edges[last][token] = new
            last = self._links[last]
        self._links[new] = 0 if last == NOTHING else self._reach(last, token)

    def _reach(self, source: int, token: int) -> int:
        """The state of exactly the contexts of `source` with `token` behind, split from longer ones if need be."""
        target = self._edges[source][token]
        if self._lengths[target] == self._lengths[source] + 1:
            return target
        split = self._new(self._lengths[source] + 1)
        self._edges[split] = dict(self._edges[target])
        self._counts[split] = dict(self._counts[target])
        self._favourites[split] = self._favourites[target]
        self._links[split] = self._links[target]
        self._links[target] = split
        while source != NOTHING and self._edges[source].get(token) == target:
            self._edges[source][token] = split
            source = self._links[source]
        return split

    def _settle(self, context: Context) -> Context:
        """The same context after splits, which move the shorter ones of a state to its link."""
        state, size = context
        while state and self._lengths[self._links[state]] >= size:
            state = self._links[state]
        return Context(state, size)

    def _step(self, context: Context, token: int) -> Context:
        """The context with `token` behind it, which follows it in some text."""
        target = self._edges[context.state][token]
        return self._settle(Context(target, min(context.size + 1, self._longest)))

    def match(self, tokens: Iterable[int]) -> Context:
        """The longest end of `tokens`, up to `longest`, that some text holds."""
        context = Context()
        for token in tokens:
            while token not in self._edges[context.state] and context.state:
                context = self._shorter(context)
            if token in self._edges[context.state]:
                context = self._step(context, token)
        return context

    def _shorter(self, context: Context) -> Context:
        link = self._links[context.state]
        return Context(link, self._lengths[link])

    def followed(self, context: Context) -> Context:
        """The longest end of `context`, of `shortest` tokens or more, that something follows; empty without one."""
        while context.state and self._favourites[context.state] == NOTHING:
            context = self._shorter(context)
        return context if context.size >= self._shortest else Context()

    def continuation(self, context: Context, limit: int) -> list[int]:
        """Up to `limit` tokens, each the most frequent one (the latest on ties) after the longest context that is
        followed by anything; the tokens before it belong to its context."""
        tokens: list[int] = []
        while len(tokens) < limit and (context := self.followed(context)).size:
            tokens.append(self._favourites[context.state])
            context = self._step(context, tokens[-1])
        return tokens
