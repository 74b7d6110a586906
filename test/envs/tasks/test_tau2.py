"""tau2-bench, with the real package: what is played, who sees what, and what tau2 itself pays."""

import pickle
from importlib import import_module

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from collectors import LLMCollector
from torchrl_data.batched_object import read_objects
from torchrl_data.conversation_io import read_conversations
from torchrl_data.tool_calls.records import ToolCall
from torchrl_envs import ChatCompletions
from torchrl_envs.audit.audited_task import play as play_audited
from torchrl_envs.audit.kinds import audited_task
from torchrl_envs.audit.scripted_agents import knowing, silent
from torchrl_envs.tasks.by_name import make_task
from torchrl_envs.tasks.task import TaskEnv
from torchrl_tasks.tau2.domain import load_domain
from torchrl_tasks.tau2.reference import solution
from torchrl_tasks.tau2.tools import _Running

MOCK = {"domain": "mock", "split": "base", "held_out_split": "base"}
STOP = "###STOP###"


def env_of(number, **changed):
    """The environment of one task of a domain."""
    task = make_task("tau2", **{**MOCK, **changed})
    (row,) = [row for row in task.train_rows if row["task"] == number]
    return TaskEnv(task, map_row=lambda _: row)


def ended(play, policy, env):
    (end,) = play(env, policy)
    env.close()
    chat = read_conversations(end, "prompt", who="test")
    said = [(m["role"], m["content"]) for m in chat.messages(0)]
    return end["reward"].item(), read_objects(end, "stop_reason")[0], said, chat.tools(0)


HEARD = []


def content(questions):
    """A customer who is content, and says so with a word that ends it."""
    HEARD.extend(questions)
    return ["Make a task." if len(q) == 2 else "###TRANSFER###" for q in questions]


def test_a_task_is_played_with_tau2s_rules_words_and_reward(scripted, play, call_text):
    made = call_text("create_task", user_id="user_1", title="Important Meeting")
    env = env_of("create_task_1", user=f"{__name__}:content")
    HEARD.clear()
    reward, reason, said, tools = ended(play, scripted([made, "Done."]), env)
    assert (reward, reason) == (1.0, "environment_done: user")
    (_, rules), opening, call, answer, last = said
    assert rules.startswith("<instructions>\nYou are a customer service agent")
    assert load_domain("mock").rules in rules
    assert (opening, call, last) == (
        ("user", "Make a task."),
        ("assistant", made),
        ("assistant", "Done."),
    )
    assert '"title": "Important Meeting"' in answer[1]
    names = [tool["function"]["name"] for tool in tools]
    assert {"create_task", "update_task_status", "get_users"} <= {*names}
    scenario = str(load_domain("mock").tasks["create_task_1"].user_scenario)
    told, greeting = HEARD[0]
    assert told["content"].endswith(f"<scenario>\n{scenario}\n</scenario>")
    assert told["content"].startswith("# User Simulation Guidelines")
    assert greeting["content"] == "Hi! How can I help you today?"


RIGHT = ("create_task", {"user_id": "user_1", "title": "Important Meeting"})
OTHER = ("create_task", {"user_id": "user_1", "title": "Meeting"})
WRONG = ("create_task", {"user_id": "user_7", "title": "Important Meeting"})


@pytest.mark.parametrize(
    ("turns", "reward", "reason"),
    [
        ([RIGHT, "Done."], 1.0, "environment_done: user"),
        ([OTHER, "Done."], 0.0, "environment_done: user"),
        ([WRONG, "Done."], 0.0, "environment_done: user"),
        (["Done."], 0.0, "environment_done: user"),
        ([RIGHT, ("get_users", {})], 0.0, "max_steps"),
    ],
    ids=["right", "another title", "an error", "nothing", "right and cut"],
)
def test_only_what_is_right_and_comes_to_its_end_is_paid(
    scripted, play, call_text, turns, reward, reason
):
    texts = [turn if isinstance(turn, str) else call_text(turn[0], **turn[1]) for turn in turns]
    env = env_of("create_task_1", user=f"{__name__}:content", max_turns=2)
    assert ended(play, scripted(texts), env)[:2] == (reward, reason)


@pytest.mark.parametrize(
    ("turns", "reward"),
    [
        (["Polyester or cotton."], 1.0),
        (["Polyester."], 0.0),
        (["<think>Polyester or cotton?</think>Well."], 0.0),
        (["Polyester or cotton. {call}", "Well."], 0.0),
    ],
    ids=["told", "half of it", "thought", "beside a call"],
)
def test_the_customer_is_told_what_it_hears(scripted, play, call_text, turns, reward):
    """Task 24 of retail changes nothing, and is paid for two words."""
    call = call_text("calculate", expression="1 + 1")
    texts = [text.format(call=call) for text in turns]
    domain = {"domain": "retail", "split": "base"}
    env = env_of("24", **domain, held_out_split="base", user=f"{__name__}:content")
    assert ended(play, scripted(texts), env)[:2] == (reward, "environment_done: user")


TASKS = [
    (domain, number)
    for domain, numbers in {
        "mock": [*load_domain("mock").tasks],
        "retail": ["0", "5", "24"],
        "airline": ["7"],
        "telecom": load_domain("telecom").splits["small"][:6],
    }.items()
    for number in numbers
]


def paid_by_tau2(module, task, trajectory):
    """The product of what tau2's evaluators give for what the task is paid by.

    An assertion about a task that was not made ends tau2's evaluation, and pays nothing here.
    """
    basis = {each.value for each in task.evaluation_criteria.reward_basis}
    reward = 1.0
    for name, counts in {
        "env": basis & {"DB", "ENV_ASSERTION"},
        "action": basis & {"ACTION"},
        "communicate": basis & {"COMMUNICATE"},
    }.items():
        if counts:
            evaluators = vars(import_module(f"tau2.evaluator.evaluator_{name}"))
            full = {"env": "Environment"}.get(name, name.capitalize())
            evaluator = evaluators[f"{full}Evaluator"]
            more = {"environment_constructor": module.get_environment} if name == "env" else {}
            given = {"task": task, "full_trajectory": trajectory, **more}
            try:
                reward *= evaluator.calculate_reward(**given).reward
            except ValueError:
                return 0.0
    return reward


@settings(max_examples=25)
@given(st.data())
def test_the_reward_is_that_of_tau2s_own_evaluation(data):
    name, number = data.draw(st.sampled_from(TASKS))
    module = import_module(f"tau2.domains.{name}.environment")
    forms = import_module("tau2.data_model.message")
    running = _Running(load_domain(name), number)
    criteria = running.task.evaluation_criteria
    actions = list(criteria.actions or ())
    # All of the reference in most cases, in some without one of its actions, or words.
    left_out = data.draw(st.sets(st.integers(0, len(actions)), max_size=1))
    told = " ".join(criteria.communicate_info or [])
    words = data.draw(st.sampled_from([told.upper(), f"It is {told}.", "Done."]))
    trajectory = []
    for place, action in enumerate(actions):
        if place in left_out:
            continue
        text, is_error = running.answer(ToolCall(action.name, action.arguments), action.requestor)
        form = forms.UserMessage if action.requestor == "user" else forms.AssistantMessage
        call = running.calls[-1]
        trajectory.append(form(role=call.requestor, tool_calls=[call]))
        answer = {"id": "", "content": text, "requestor": call.requestor, "error": is_error}
        trajectory.append(forms.ToolMessage(role="tool", **answer))
    trajectory.append(forms.AssistantMessage(role="assistant", content=words))
    expected = paid_by_tau2(module, running.task, trajectory)
    assert running.reward([words], is_cut=False) == expected
    if not left_out and words != "Done.":
        assert expected == 1.0
    assert running.reward([words], is_cut=True) == 0.0


@pytest.mark.parametrize("domain", ["mock", "retail", "telecom"])
def test_the_reference_solves_its_task_and_silence_does_not(domain):
    splits = {"split": "base", "held_out_split": "base"}
    task = audited_task("tau2", {"domain": domain, **splits})
    played = [play_audited(task, knowing(solution), seed) for seed in range(4)]
    assert [each.reward for each in played] == [1.0] * 4
    assert all(each.has_ended for each in played)
    assert play_audited(task, silent, 0).reward == 0.0


def test_what_the_customer_does_is_not_seen_by_the_policy(scripted):
    domain = load_domain("telecom")

    def acts(number):
        actions = domain.tasks[number].evaluation_criteria.actions
        return any(action.requestor == "user" for action in actions)

    number = next(filter(acts, domain.splits["small"]))
    env = env_of(number, domain="telecom", split="small", held_out_split="small")
    batch = LLMCollector(env, scripted(["Please look."])).collect()
    env.close()
    chat = read_conversations(batch, "full", who="test")
    assert [m["role"] for m in chat.messages(0)] == ["system", "user", "assistant"]
    offered = {tool["function"]["name"] for tool in chat.tools(0)}
    assert offered == {*domain.tools}
    assert not offered & {*domain.user_tools}
    assert batch["num_tool_calls"].item() == 0


def test_a_server_plays_the_customer_and_splits_are_tau2s():
    server = {"user": "http://localhost:1/v1", "user_model": "m", "user_temperature": 0.5}
    task = make_task("tau2", **server, num_held_out=3)
    user = task.user()
    assert isinstance(user.user, ChatCompletions)
    assert (user.user.generation["temperature"], user.opens) == (0.5, True)
    assert user.ends == (STOP, "###TRANSFER###", "###OUT-OF-SCOPE###")
    splits = load_domain("retail").splits
    assert [row["task"] for row in task.train_rows] == splits["train"]
    assert [row["task"] for row in task.held_out_rows] == splits["test"][:3]
    assert not {*splits["train"]} & {*splits["test"]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"domain": "hotel"}, r"domain='hotel' is none of \['airline', 'mock', 'retail'"),
        ({"split": "dev"}, r"split='dev' is none of the splits of retail: \['base', 'test'"),
        ({"held_out_split": "dev"}, "held_out_split='dev' is none"),
        ({"user_model": "m"}, "user_model has no effect"),
        ({"user": "http://localhost:1/v1"}, "give user_model="),
        ({"max_turns": 0}, "max_turns"),
    ],
)
def test_what_can_not_be_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        make_task("tau2", **given)


def test_tasks_that_begin_in_the_middle_are_left_out():
    domain = load_domain("mock")
    every = import_module("tau2.domains.mock.environment").get_tasks(None)
    begun = {t.id for t in every if t.initial_state and t.initial_state.message_history}
    assert begun
    assert {*domain.tasks} == {task.id for task in every} - begun


def test_a_domain_of_ones_own_is_a_module_and_each_process_reads_it_once():
    mock, own = load_domain("mock"), load_domain("tau2.domains.mock.environment")
    assert (own.rules, {*own.tasks}) == (mock.rules, {*mock.tasks})
    assert pickle.loads(pickle.dumps(mock)) is mock
    with pytest.raises(ModuleNotFoundError, match="nowhere"):
        load_domain("nowhere.to_be_found")
