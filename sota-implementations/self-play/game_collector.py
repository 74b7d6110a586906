"""Games of the policy against itself: each gives two rows, one of each seat."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from opponent_pool import OpponentPool
from tensordict import TensorDictBase, lazy_stack

from collectors import LLMCollector
from collectors.trajectory_rows import trajectory_rows
from torchrl_data.conversation import Conversations
from torchrl_data.stop_reason import StopReason, kind_of
from torchrl_data.tool_calls.parser import parse_tool_calls
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs import EnvironmentTools
from torchrl_envs.entries.observations import with_observation
from torchrl_envs.entries.rewards import RowReward, Score
from torchrl_envs.episode.episode import Episode
from torchrl_envs.episode.episode_entries import batch_of_ended
from torchrl_envs.episode.tool_source import tool_message
from torchrl_envs.tasks.task import TaskEnv
from torchrl_modules import LLMWrapperBase

SEATS: Final = 2
AGENT: Final = "agent"
"""The entry of a row that says which seat it is, int64 ``[1]``."""
WIN: Final = "win"
"""The name of the reward: 1 for a game that was won, else 0."""
PAST: Final = "past_opponent"
"""The entry of a row that says whether a past version played the other seat, int64 ``[1]``."""
WIN_AGAINST_PAST: Final = "win_against_past"
"""The same as the reward, of those rows alone; a metric."""
Game = Any
"""A game for two: ``turn`` (who moves, 0 or 1), ``winner``, ``is_over``, ``view()`` (what who is to
move sees), ``forfeit()`` (that one loses), and its tools, named as those of the environment."""


class GameCollector(LLMCollector):
    """Lets the policy play both seats; a seat sees the board where it would see a tool's answer.

    All games move at once, so that each turn of the policy is one batch. A turn without a call, or
    with one that can't be read, loses. Where the engine fails, neither seat is scored.

    Args:
        env: of the task: its data, drawn in groups of two, and the tools that it shows.
        policy: plays.
        make_game: from a row of the data.
        opponents: past versions of the policy, which play some games.
        **kwargs: see :class:`~collectors.LLMCollector`.
    """

    def __init__(
        self,
        env: TaskEnv,
        policy: LLMWrapperBase,
        make_game: Callable[[Mapping[str, Any]], Game],
        opponents: OpponentPool | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(env, policy, **kwargs)
        self._make_game = make_game
        self._opponents = opponents
        self._source = next(env.transforms_of(EnvironmentTools))
        (self._tools,) = self._source.tools.values()

    def _run_batch(self) -> tuple[TensorDictBase, int]:
        runner = self.env.runner
        episodes = [Episode(row) for row in range(self.env.batch_size.numel())]
        runner.draw(episodes)
        past: Mapping[int, int] = {}  # the seat of a past version, by the number of the game
        if self._opponents is not None:
            past = self._opponents.draw(len(episodes) // SEATS)
        try:
            self._play(episodes, past)
        finally:
            runner.close(episodes)
        batch = batch_of_ended(episodes, [WIN], has_tools=True)
        own = [n for n in range(len(episodes)) if past.get(n // SEATS) != n % SEATS]
        rows = [row for rows in trajectory_rows(batch, own) for row in rows]
        for number, row in zip(own, rows, strict=True):
            row.set(AGENT, torch.tensor([number % SEATS]))
            row.set(PAST, torch.tensor([int(number // SEATS in past)]))
        return lazy_stack(rows), len(episodes)

    def _play(self, episodes: Sequence[Episode], past: Mapping[int, int]) -> None:
        """Take all games to their ends."""
        tables = [episodes[i : i + SEATS] for i in range(0, len(episodes), SEATS)]
        games = [self._make_game(seats[0].example or {}) for seats in tables]
        for game, seats in zip(games, tables, strict=True):
            for episode in seats:
                self._open(episode, game)
        while going := [i for i, game in enumerate(games) if not game.is_over]:
            theirs = [i for i in going if past.get(i) == games[i].turn]
            ours = [i for i in going if past.get(i) != games[i].turn]
            self._speak(self.policy, [tables[i][games[i].turn] for i in ours])
            if self._opponents is not None:
                self._speak(self._opponents.policy, [tables[i][games[i].turn] for i in theirs])
            for i in going:
                self._move(games[i], tables[i], tables[i][games[i].turn])
        for number, (game, seats) in enumerate(zip(games, tables, strict=True)):
            _score(game, seats, is_against_past=number in past)

    def _speak(self, policy: LLMWrapperBase, episodes: Sequence[Episode]) -> None:
        """Take a turn in each."""
        if not episodes:
            return
        asked = Conversations.cat([episode.conversation for episode in episodes])
        _, full, reasons = policy.respond(asked)
        for number, episode in enumerate(episodes):
            episode.conversation, episode.finish_reason = full.row(number), reasons[number]
            episode.num_turns += 1

    def _open(self, episode: Episode, game: Game) -> None:
        if self._source.show_schemas:
            episode.tools = [tool.schema for tool in self._tools.values()]
        base: Any = self.env.base_env
        query = with_observation(episode.query, game.view())
        episode.conversation = base.open(query, episode.tools)  # with the stream of its draw

    def _move(self, game: Game, seats: Sequence[Episode], episode: Episode) -> None:
        """Do what a turn calls for, and show the other seat what it sees then."""
        if kind_of(episode.finish_reason) == StopReason.ERROR:
            episode.truncate(episode.finish_reason)
            game.forfeit()
            return
        calls = parse_tool_calls(episode.last_message["content"]).calls
        call = calls[0] if len(calls) == 1 else None
        tool = self._tools.get(call.name) if isinstance(call, ToolCall) else None
        if not isinstance(call, ToolCall) or tool is None or tool.argument_error(call.arguments):
            game.forfeit()
            return
        getattr(game, call.name)(**call.arguments)
        episode.num_tool_calls += 1
        if game.is_over:
            return
        other = seats[game.turn]
        if other.num_turns:
            own = parse_tool_calls(other.last_message["content"]).calls[0]
            other.say(tool_message(own if isinstance(own, ToolCall) else None, game.view()))
        else:
            self._open(other, game)


def _score(game: Game, seats: Sequence[Episode], *, is_against_past: bool) -> None:
    failed = next((episode.stop_reason for episode in seats if episode.is_truncated), "")
    for seat, episode in enumerate(seats):
        if failed:
            episode.truncate(failed)
            episode.score = Score(error=failed)
            continue
        episode.terminate(StopReason.ENVIRONMENT_DONE)
        episode.settle()
        episode.score = Score()
        if episode.num_turns:  # or the other one lost before
            won = RowReward(float(game.winner == seat))
            episode.score.add(WIN, won)
            if is_against_past:
                episode.score.add(WIN_AGAINST_PAST, won, weight=0.0, scores=False)
