"""Data and composition: what is drawn, and what can't work is said before anything runs."""

import copy
import functools
import json

import datasets
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from tensordict import TensorDict
from torchrl.data import LazyStackStorage, ReplayBuffer
from torchrl.envs import TransformedEnv
from torchrl.envs.transforms import Compose

from collectors import LLMCollector, StreamingCollector
from torchrl_data import ToolsNotShownError, builtin_template
from torchrl_data.batched_object import read_objects
from torchrl_data.missing_entry import MissingEntryError
from torchrl_envs import (
    AgentProgram,
    AnswerReward,
    ChatEnv,
    DataLoadingPrimer,
    DataOptions,
    EnvironmentTools,
    Episode,
    FunctionTools,
    LLMJudge,
    RewardFunctions,
    StepCounter,
    StepEnvironments,
    TokenBudget,
    row_reward,
)
from torchrl_envs.tool_schemas import schema_tool
from torchrl_modules import TransformersWrapper

ROWS = [{"prompt": f"<{i}>", "number": i} for i in range(4)]


def score(completions):
    return [0.0] * len(completions)


class Good:
    def reset(self, *, number):
        self.number = number

    def get_reward(self):
        return 0.0


def compose(*transforms, batch_size=4):
    return ChatEnv(batch_size=batch_size).append_transform(Compose(*transforms))


def draws(loader, batch_size=4, resets=1):
    env = compose(loader, RewardFunctions([score]), batch_size=batch_size)
    batches = [env.reset() for _ in range(resets)]
    numbers = [[row["number"] for row in read_objects(batch, "row")] for batch in batches]
    return (
        [number for batch in numbers for number in batch],
        torch.cat([batch["group_id"] for batch in batches]).tolist(),
        torch.cat([batch["seed"] for batch in batches]).tolist(),
    )


# Data ---------------------------------------------------------------------------------------------


def test_a_group_shares_its_row_id_and_seed_and_no_other_group_has_them():
    numbers, groups, seeds = draws(DataLoadingPrimer(ROWS, group_size=2), resets=4)
    # Four groups are an epoch: in the second the same rows are other groups.
    assert numbers == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert groups == [epoch * 2**40 + n for epoch in range(2) for n in range(4) for _ in range(2)]
    assert seeds[::2] == seeds[1::2]
    assert len(set(seeds[::2])) == 8


def test_groups_are_told_apart_when_their_prompts_are_the_same():
    rows = [{"prompt": "same", "number": i} for i in range(2)]
    numbers, groups, _ = draws(DataLoadingPrimer(rows, group_size=2))
    assert (numbers, groups) == ([0, 0, 1, 1], [0, 0, 1, 1])


def test_shuffling_is_another_order_each_epoch_and_the_same_for_a_seed():
    orders = [draws(DataLoadingPrimer(ROWS * 8, shuffle=True, seed=s), 32, 2) for s in (0, 0, 1)]
    first, second = orders[0][0][:32], orders[0][0][32:]
    assert sorted(first) == sorted(second) == sorted([0, 1, 2, 3] * 8)
    assert first != second
    assert orders[0] == orders[1] != orders[2]


def test_rewinding_draws_the_same_again():
    loader = DataLoadingPrimer(ROWS, group_size=2, shuffle=True, seed=5)
    first = draws(loader, resets=3)
    loader.rewind()
    assert draws(loader, resets=3) == first


def test_a_dataset_of_datasets_works():
    loader = DataLoadingPrimer(datasets.Dataset.from_list(ROWS), prompt_column="prompt")
    assert draws(loader)[0] == [0, 1, 2, 3]


# What can't work ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "words"),
    [
        pytest.param(
            lambda: DataLoadingPrimer([{"words": "a"}]),
            r"no prompt column 'prompt' or .*; its columns are \['words'\].*prompt_column=",
            id="no prompt column",
        ),
        pytest.param(
            lambda: DataLoadingPrimer(ROWS, prompt_column="promt"),
            r"no prompt column 'promt'; its columns are \['prompt', 'number'\]",
            id="misspelt prompt column",
        ),
        pytest.param(lambda: DataLoadingPrimer([]), "has no rows", id="no data"),
        pytest.param(
            lambda: DataLoadingPrimer(iter(ROWS)), "walked through only once", id="iterator"
        ),
        pytest.param(
            lambda: DataLoadingPrimer(ROWS, group_size=0),
            "group_size must be a whole number, at least 1, got 0",
            id="group",
        ),
        pytest.param(
            lambda: compose(
                DataLoadingPrimer(ROWS, group_size=3), RewardFunctions([score])
            ).check(),
            "4 rows does not hold whole groups of 3.*multiple of group_size",
            id="batch is no multiple of the group",
        ),
        pytest.param(
            lambda: compose(
                DataLoadingPrimer([{"prompt": "a", "other": 1}]), EnvironmentTools(Good)
            ).check(),
            r"Good.reset needs the columns \['number'\].*have \['other', 'prompt'\]\. Add them",
            id="no column for reset",
        ),
        pytest.param(
            lambda: compose(DataLoadingPrimer(ROWS), EnvironmentTools({"good": Good})).check(),
            r"needs the columns \['environment'\], which the data lack.*route_column=",
            id="no routing column",
        ),
        pytest.param(
            lambda: compose(
                DataLoadingPrimer([{**row, "kind": "bad"} for row in ROWS]),
                EnvironmentTools({"good": Good}, route_column="kind"),
            ).check(),
            r"4 row\(s\) can't be used: row 0: it names the environment 'bad'; there are \['go",
            id="unknown environment",
        ),
        pytest.param(
            lambda: compose(
                DataLoadingPrimer(ROWS), EnvironmentTools(type("Mute", (), {"reset": id}))
            ).check(),
            r"No reward: neither Mute has a get_reward.*RewardFunctions",
            id="tools and no reward",
        ),
        pytest.param(
            lambda: compose(
                DataLoadingPrimer(ROWS),
                RewardFunctions([score]),
                EnvironmentTools(type("Static", (), {"get_reward": Good.get_reward})),
            ).check(),
            r"Static has no reset\(self, \*\*row\)",
            id="no reset",
        ),
        pytest.param(lambda: ChatEnv(batch_size=(2, 0)), r"at least one row.*2, 0", id="no rows"),
        pytest.param(lambda: ChatEnv(input_mode="txt"), "input_mode.*got 'txt'", id="mode"),
        pytest.param(
            lambda: ChatEnv(input_mode="tokens"), "chat template.*give tokenizer=", id="tokenizer"
        ),
    ],
)
def test_what_can_not_work_is_named_before_it_runs(build, words):
    with pytest.raises(ValueError, match=words):
        build()


def no_docstring(self, x: int): ...


def no_description(self, x: int):
    """Do it."""


def no_type(self, x):
    """Do it.

    Args:
        x: A number.
    """


@pytest.mark.parametrize("method", [no_docstring, no_description, no_type])
def test_a_tool_that_a_model_can_not_understand_is_refused(method):
    cls = type("Wordle", (Good,), {"guess": method})
    if method.__name__ != "guess":
        method.__name__ = "guess"
    with pytest.raises(ValueError, match=r"The tool Wordle.guess can't be offered.*docstring"):
        EnvironmentTools(cls)


def test_every_public_method_is_a_tool_and_nothing_else():
    class Base(Good):
        def first(self) -> str:
            """Be inherited."""
            return ""

        def hidden(self) -> str:
            """Be replaced by a value."""
            return ""

        def _private(self): ...

        @property
        def value(self):
            return 1

        @staticmethod
        def build(x): ...

    class Child(Base):
        hidden = None

        @classmethod
        def second(cls, x: int = 3) -> str:
            """Be of the class.

            Args:
                x: A number.
            """
            return str(x)

        def close(self): ...

    tools = EnvironmentTools(Child).tools["Child"]
    assert list(tools) == ["first", "second"]
    parameters = tools["second"].schema["function"]["parameters"]
    assert parameters["properties"]["x"]["description"] == "A number."
    assert "required" not in parameters
    assert tools["second"].argument_error({}) is None
    assert "['x']" in tools["second"].argument_error({"x": "3"})


class Needs(Good):
    def __init__(self, url):
        self.url = url


class Asks(Good):
    def get_reward(self, completions, messages, scale=1.0): ...


class Holds(Good):
    get_reward = 3.0


class Stays(Good):
    async def close(self, force): ...


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (Needs, r"Needs is made without arguments.*requires \['url'\].*lambda: Needs\(url=...\)"),
        (Asks, r"Asks.get_reward requires \['completions'\].*gets messages if it names it"),
        (Holds, r"Holds.get_reward must be a method, got float"),
        (Stays, r"Stays.close requires \['force'\].*it gets no arguments"),
    ],
)
def test_signatures_of_environments_are_checked_when_composed(cls, words):
    with pytest.raises(TypeError, match=words):
        EnvironmentTools(cls)
    with pytest.raises(TypeError, match=words):
        EnvironmentTools({"one": Good, "other": cls})


def test_environments_made_by_functions_and_with_further_arguments_are_taken():
    class Scored(Good):
        def get_reward(self, messages, scale=1.0, **rest): ...

        @classmethod
        def close(cls): ...

    assert list(EnvironmentTools(lambda: Needs("url")).types) == ["Needs"]
    assert EnvironmentTools(Scored).reward_names == ["Scored"]


@pytest.mark.parametrize(
    "transform",
    [
        pytest.param(lambda: RewardFunctions([score]), id="rewards"),
        pytest.param(lambda: Compose(DataLoadingPrimer(ROWS)), id="data, composed"),
        pytest.param(lambda: EnvironmentTools(Good), id="tools"),
    ],
)
def test_an_episode_transform_in_a_plain_environment_says_what_to_use(transform):
    env = TransformedEnv(ChatEnv(batch_size=1), transform())
    with pytest.raises(
        RuntimeError, match=r"EpisodeEnv only: use ChatEnv\(...\)\.append_transform"
    ):
        env.reset(TensorDict({"query": ["a"]}, batch_size=[1]))


def test_a_reset_without_data_says_what_to_do():
    with pytest.raises(MissingEntryError, match="Append a DataLoadingPrimer"):
        ChatEnv(batch_size=1).reset()


def tool_with(*, doc="Do it.\n\n    Args:\n        x: A number.", hint=int, name="f"):
    def f(x):
        pass

    f.__doc__, f.__name__ = doc, name
    f.__annotations__ = {} if hint is None else {"x": hint}
    return f


def positional(x: int, /) -> None:
    """Do it.

    Args:
        x: A number.
    """


def many(*xs: int) -> None:
    """Do it.

    Args:
        xs: Numbers.
    """


@pytest.mark.parametrize(
    ("functions", "kind", "message"),
    [
        pytest.param([], ValueError, "needs at least one function", id="none"),
        pytest.param([tool_with(doc=None)], ValueError, "The tool f .* no docstring", id="no doc"),
        pytest.param(
            [tool_with(doc="Do it.")],
            ValueError,
            "f .* no description for the argument 'x'",
            id="no description",
        ),
        pytest.param([tool_with(hint=None)], ValueError, "x is missing a type hint", id="no hint"),
        pytest.param([positional], ValueError, "argument x is positional-only", id="positional"),
        pytest.param([many], ValueError, r"argument \*xs is variadic positional", id="variadic"),
        pytest.param([lambda: 1], ValueError, "'<lambda>' can't be called by", id="lambda"),
        pytest.param({"a b": tool_with()}, ValueError, "'a b' can't be called", id="name"),
        pytest.param([tool_with()] * 2, ValueError, "two functions named 'f'", id="twice"),
        pytest.param([Good()], TypeError, "is a function or a method, got Good", id="object"),
    ],
)
def test_functions_that_can_not_be_tools(functions, kind, message):
    with pytest.raises(kind, match=message):
        FunctionTools(functions)


def test_functions_by_another_name_and_methods_of_an_object():
    class Store:
        def read(self, x: int) -> str:
            """Read.

            Args:
                x: A number.
            """

    tools = FunctionTools({"load": Store().read, "f": tool_with()})
    assert list(tools.tools_of(Episode())) == ["load", "f"]
    assert tools.tools["load"].schema["function"]["name"] == "load"
    assert tools.tool_names() == {"load": "FunctionTools", "f": "FunctionTools"}


SCHEMAS = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={
        "properties": st.dictionaries(
            st.sampled_from(["a", "b"]),
            st.sampled_from(
                [
                    {"type": "integer"},
                    {"type": "string", "description": "d"},
                    {"type": "number"},
                    {"type": "boolean", "title": "t"},
                    {"type": "string", "enum": ["x"]},
                    {"type": ["integer", "null"]},
                    {"type": "integer", "nullable": True},
                    {"minimum": 3},
                    {},
                ]
            ),
        ),
        "required": st.lists(st.sampled_from(["a", "b", ""]), max_size=2, unique=True),
        "minProperties": st.just(1),
        "not": st.just({"required": ["a"]}),
    },
)
VALUES = st.sampled_from([1, 2.5, 1.0, True, "x", "y", None, []])


@settings(max_examples=300, deadline=None)
@given(SCHEMAS, st.dictionaries(st.sampled_from(["a", "b", "c"]), VALUES))
def test_what_is_soon_seen_to_be_right_is_right(schema, arguments):
    function = {"name": "f", "description": "", "parameters": schema}
    tool = schema_tool({"type": "function", "function": function})
    valid = Draft202012Validator(tool.validator.schema).is_valid(arguments)
    assert (tool.argument_error(arguments) is None) == valid


@pytest.mark.parametrize("make", [lambda cls: cls, lambda cls: lambda: cls(), functools.partial])
def test_an_environment_is_known_by_its_class_whatever_makes_it(make):
    class Scored:
        def reset(self, **row):
            pass

        def get_reward(self):
            return 1.0

    assert EnvironmentTools(make(Scored)).reward_names == ["Scored"]


def test_what_can_not_make_an_environment_is_named():
    with pytest.raises(TypeError, match=r"a class, a callable .* got 5"):
        EnvironmentTools(5)


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: One.
        b: The other.
    """
    return a + b


@pytest.fixture
def silent(chatml_tokenizer):
    """A tokenizer whose chat template leaves tools out."""
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.chat_template = builtin_template("falcon")
    return tokenizer


def with_tools(prompt, *, show_schemas=True, **kwargs):
    tools = FunctionTools([add], show_schemas=show_schemas)
    return ChatEnv(batch_size=1, **kwargs).append_transform(
        Compose(DataLoadingPrimer([{"prompt": prompt}]), tools, RewardFunctions([score]))
    )


def test_tools_that_a_template_leaves_out_are_refused_at_the_door(silent, scripted):
    with pytest.raises(ToolsNotShownError, match=r"does not show tools.*\['add'\]"):
        with_tools("2 + 2?", tokenizer=silent).check()
    policy = scripted(["4"], tokenizer=silent)
    with pytest.raises(ToolsNotShownError, match=r"does not show tools.*\['add'\]"):
        LLMCollector(with_tools("2 + 2?"), policy)


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(lambda: with_tools("Call add."), id="the prompt names them"),
        pytest.param(lambda: with_tools("2?", system_prompt="add(a, b) adds."), id="the system's"),
        pytest.param(lambda: with_tools("2?", show_schemas=False), id="not to be shown"),
    ],
)
def test_tools_that_prompts_name_need_no_template(build, silent, scripted):
    env = build()
    env.base_env.tokenizer = silent
    env.check()
    LLMCollector(env, scripted(["4"], tokenizer=silent))


# Columns that somebody needs ----------------------------------------------------------------------


def of_many(completions, number):
    return [float(n) for n in number]


@row_reward
def of_one(completion, number):
    return float(number)


class Parser(AnswerReward):
    required_columns = ("number",)
    component_keys = ()

    def components(self, text, row, query):
        return {"reward": float(row["number"])}


class Stepped:
    def reset(self, *, seed=None, options=None):
        return "", {}

    def step(self, text):
        return "", 1.0, True, False, {}


def judge(questions):
    return ["<score>0.5</score>" for _ in questions]


def program(endpoint, number):
    return 1.0


NEEDS = [
    pytest.param(lambda: RewardFunctions([of_many]), "the reward function of_many", id="of many"),
    pytest.param(lambda: RewardFunctions([of_one]), "the reward function of_one", id="of one"),
    pytest.param(
        lambda: RewardFunctions([LLMJudge(judge, columns=["number"])]),
        "the reward function LLMJudge",
        id="judge",
    ),
    pytest.param(Parser, "Parser", id="parser"),
    pytest.param(lambda: EnvironmentTools(Good), "Good.reset", id="environment"),
    pytest.param(
        lambda: StepEnvironments(lambda _: Stepped(), reset_columns=["number"]),
        "StepEnvironments",
        id="steps",
    ),
    pytest.param(lambda: AgentProgram(program), "AgentProgram: the program", id="agent"),
]


@pytest.mark.parametrize(("make", "who"), NEEDS)
@pytest.mark.parametrize("kind", ["list", "json", "table"])
def test_a_row_without_a_column_that_is_needed_is_named_or_left_out(
    kind, make, who, tmp_path, caplog
):
    rows = [dict(row) for row in ROWS]
    del rows[2]["number"]
    if kind == "json":
        (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {
        "list": lambda: rows,
        "json": lambda: tmp_path / "rows.jsonl",
        "table": lambda: datasets.Dataset.from_list(rows),
    }[kind]
    with pytest.raises(ValueError, match=rf"row 2: it lacks \['number'\], which {who} needs"):
        compose(DataLoadingPrimer(data()), make()).check()
    loader = DataLoadingPrimer(data(), options=DataOptions(skip_bad_rows=True))
    env = compose(loader, make())
    env.check()
    assert list(loader.left_out) == [2]
    numbers = [row["number"] for row in read_objects(env.reset(), "row")]
    assert numbers == [0, 1, 3, 0]
    env.close()
    absent = [{"prompt": row["prompt"]} for row in rows]
    with pytest.raises(ValueError, match=r"'number'"):
        compose(DataLoadingPrimer(absent), make()).check()


def test_a_column_with_a_default_may_be_missing(scripted):
    """In some rows, or in all; None of JSON is a value like any other."""
    seen = {}

    def of_many(completions, number="none", other="none"):
        seen["many"] = number, other
        return [1.0] * len(completions)

    @row_reward
    def of_one(completion, number="none"):
        seen.setdefault("one", []).append(number)
        return 1.0

    rows = [{"prompt": "<0>", "number": 7}, {"prompt": "<1>"}, {"prompt": "<2>", "number": None}]
    env = compose(DataLoadingPrimer(rows), RewardFunctions([of_many, of_one]), batch_size=3)
    env.step(scripted({f"<{i}>": ["said"] for i in range(3)})(env.reset()))
    seen["one"].sort(key=str)  # calls of one row each, at the same time
    assert seen == {"many": ([7, None, None], "none"), "one": [7, None, "none"]}
    env.close()


def test_rows_of_one_task_need_no_column_of_another():
    """Routed environments, each with a column of its own."""

    class Other(Good):
        def reset(self, *, word):
            self.word = word

    rows = [
        {"prompt": "a", "kind": "good", "number": 1},
        {"prompt": "b", "kind": "other", "word": 2},
    ]
    tools = functools.partial(EnvironmentTools, {"good": Good, "other": Other}, route_column="kind")
    compose(DataLoadingPrimer(rows), tools(), batch_size=2).check()
    rows[1].pop("word")
    rows.append({"prompt": "c", "kind": "good", "number": 1, "word": 1})
    with pytest.raises(ValueError, match=r"row 1: it lacks \['word'\], which other.reset needs"):
        compose(DataLoadingPrimer(rows), tools(), batch_size=2).check()


@pytest.mark.parametrize("column", ["environments", "trainer_state", "completions", "prompts"])
def test_a_column_that_another_value_takes_the_name_of_is_refused_or_told(column, caplog):
    rows = [{"question": "a", column: "of the data"}]

    def names(completions, environments, trainer_state, prompts): ...

    def takes_any(completions, **columns): ...

    with pytest.raises(
        ValueError, match=rf"have the columns \['{column}'\], and .* names gets some"
    ):
        compose(DataLoadingPrimer(rows), RewardFunctions([names])).check()
    if column == "completions":  # which every function names
        return
    compose(DataLoadingPrimer(rows), RewardFunctions([takes_any])).check()
    assert (
        f"The data have the columns ['{column}'], and the reward function takes_any" in caplog.text
    )


# Prompts that a chat template, or the model, does not take ----------------------------------------

NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_a_template_that_refuses_a_system_prompt_is_named_with_row_and_remedy(
    scripted, chatml_tokenizer
):
    tokenizer = copy.deepcopy(chatml_tokenizer)
    tokenizer.chat_template = NO_SYSTEM
    policy = scripted({}, tokenizer=tokenizer)
    system = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [{"prompt": "a"}, {"prompt": system}]
    words = (
        r"prompt of row 1, whose roles are \['system', 'user'\]: no system role. .*leave system_p"
    )
    with pytest.raises(ValueError, match=words):
        LLMCollector(compose(DataLoadingPrimer(rows), RewardFunctions([score])), policy)
    loader = DataLoadingPrimer(rows, options=DataOptions(skip_bad_rows=True))
    env = compose(loader, RewardFunctions([score]), batch_size=2)
    LLMCollector(env, policy)
    assert list(loader.left_out) == [1]
    assert [row["prompt"] for row in read_objects(env.reset(), "row")] == ["a", "a"]


@pytest.mark.parametrize("kind", ["sync", "streaming"])
def test_prompts_that_are_too_long_for_the_model_are_left_out(
    kind, chatml_tokenizer, make_tiny_model
):
    settings = {"max_new_tokens": 2}
    model = make_tiny_model()
    policy = TransformersWrapper(
        model, tokenizer=chatml_tokenizer, generate_kwargs=settings, max_model_len=48
    )
    rows = [{"prompt": "long " * 100 if n % 2 else "short", "number": n} for n in range(8)]
    parts = [DataLoadingPrimer(rows, group_size=2), RewardFunctions([score])]
    env = compose(*parts, StepCounter(max_steps=1), batch_size=8)
    if kind == "sync":
        collector = LLMCollector(env, policy)
    else:
        buffer = ReplayBuffer(storage=LazyStackStorage())
        collector = StreamingCollector(env, policy, replay_buffer=buffer, groups_per_step=4)
    for _ in range(3):
        batch = collector.collect()
        assert {row["row"]["number"] % 2 for row in batch.unbind(0)} == {0}
        assert batch["scorable"].all()
        collector.update_policy_weights_(model)
    assert parts[0].skipped.counts["too_long"] > 0
    collector.shutdown()


@pytest.mark.parametrize("kind", ["sync", "streaming"])
def test_prompts_after_which_a_budget_leaves_no_turn_are_left_out_and_told(
    kind, chatml_tokenizer, make_tiny_model, caplog
):
    """A turn has four tokens at least: a prompt of n fits into n + 4, and a longer one does not."""
    model = make_tiny_model()
    policy = TransformersWrapper(
        model, tokenizer=chatml_tokenizer, generate_kwargs={"max_new_tokens": 4}
    )

    def length(text):
        text = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        return len(chatml_tokenizer(text, add_special_tokens=False)["input_ids"])

    texts = {length(text): text for n in range(60) if (text := "a " * n + "b")}
    shorter, longest = sorted(n for n in texts if n <= 40)[-2:]
    above = min(n for n in texts if n > longest)
    rows = [{"prompt": texts[n], "number": n} for n in (longest, above, shorter, max(texts))]
    budget = TokenBudget(
        max_tokens=8, max_model_len=longest + 4, min_turn_tokens=4, encoder=policy.encoder
    )
    loader = DataLoadingPrimer(rows, group_size=2)
    env = compose(loader, RewardFunctions([score]), budget, StepCounter(max_steps=1), batch_size=4)
    if kind == "sync":
        collector = LLMCollector(env, policy)
    else:
        buffer = ReplayBuffer(storage=LazyStackStorage())
        collector = StreamingCollector(env, policy, replay_buffer=buffer, groups_per_step=2)
    (told,) = [record.getMessage() for record in caplog.records if "too long" in record.msg]
    assert told.startswith("2 row(s) are left out, whose prompts are too long"), told
    assert f"row 1: the prompt has {above} tokens, {longest} are allowed; row 3: " in told
    drawn = set()  # beside training groups come as they end: a batch may be of one prompt alone
    for _ in range(3):
        batch = collector.collect()
        drawn |= {row["row"]["number"] for row in batch.unbind(0)}
        assert batch["scorable"].all()
        collector.update_policy_weights_(model)
    assert drawn == {longest, shorter}
    assert sum("too long" in record.msg for record in caplog.records) == 1
    collector.shutdown()


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        pytest.param(
            lambda: compose(DataLoadingPrimer(ROWS, group_size=2), DataLoadingPrimer(ROWS)).reset(),
            ValueError,
            "the environment has 2 of them, and the rows of the last one would take the place",
            id="two loaders",
        ),
        pytest.param(
            lambda: ChatEnv(batch_size=2, system_prompt=["Be brief."]),
            TypeError,
            "ChatEnv: system_prompt must be a string, got .'Be brief.'.",
            id="system prompt",
        ),
        pytest.param(
            lambda: FunctionTools(add), TypeError, "takes a list of functions: .<func", id="tool"
        ),
    ],
)
def test_what_is_put_together_wrongly_is_named_when_it_is(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_prompts_of_which_none_is_short_enough_are_refused(chatml_tokenizer, make_tiny_model):
    policy = TransformersWrapper(make_tiny_model(), tokenizer=chatml_tokenizer, max_model_len=24)
    rows = [{"prompt": "long " * (40 + n)} for n in range(300)]
    for data in (rows, rows[:7]):
        env = compose(DataLoadingPrimer(data), RewardFunctions([score]), batch_size=2)
        with pytest.raises(
            ValueError, match=r"no prompt is short enough: row \d+: .* 23 are allowed"
        ):
            LLMCollector(env, policy)
    stream = DataLoadingPrimer(lambda: iter([*rows, {"prompt": "a"}]))  # its first row is seen
    LLMCollector(compose(stream, batch_size=2), policy)
    LLMCollector(compose(DataLoadingPrimer([*rows, {"prompt": "a"}]), batch_size=2), policy)
