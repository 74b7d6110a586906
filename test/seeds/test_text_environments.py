"""What a user of TRL 0.11's page on text environments brings along works here."""

import io

import pytest
import torch
from rich.console import Console

from collectors import TextEnvironment
from torchrl_data.display.text_history import TextHistory


def add(text):
    int_1, int_2 = text.split("+")
    return str(int(int_1) + int(int_2))


class SimpleCalculatorTool:
    """A tool of a string, as those of transformers were."""

    def __call__(self, query: str) -> str:
        top, bottom = query.split("/")
        return str(int(top) / int(bottom))


def reward_fn(result, answer):
    return int(result.split("=")[1].split("<")[0] == answer) if "=" in result else 0


@pytest.mark.parametrize(
    "tools", [{"SimpleCalculatorTool": SimpleCalculatorTool()}, [SimpleCalculatorTool()], [add]]
)
def test_run(make_tiny_model, chatml_tokenizer, tools):
    text_env = TextEnvironment(
        model=make_tiny_model(),
        tokenizer=chatml_tokenizer,
        tools=tools,
        reward_fn=reward_fn,
        prompt="What is 4/2?\n<request><SimpleCalculatorTool>4/2<call>2.0<response>\n=2.0<submit>",
        max_turns=1,
        max_tool_response=100,
        generation_kwargs={"do_sample": "true", "max_new_tokens": 16},
    )
    queries = ["What is 1/2?", "What is 1/4?"]
    queries, responses, masks, rewards, histories = text_env.run(queries, answer=["0.5", "0.25"])
    assert len(queries) == len(responses) == len(masks) == len(rewards) == 2
    for query, response, mask, history in zip(queries, responses, masks, histories, strict=True):
        assert torch.equal(torch.cat([query, response]), history.tokens)
        assert torch.equal(mask, history.token_masks[len(query) :])
        assert history.completed
    text_env.close()


def test_the_methods_of_the_page(make_tiny_model, chatml_tokenizer):
    text_env = TextEnvironment(make_tiny_model(), chatml_tokenizer, [add], reward_fn)

    def history_of(*segments):
        history = text_env.begin("q")
        for text, system in segments:
            ids = torch.tensor(chatml_tokenizer.encode(text, add_special_tokens=False))
            history.append_segment(text, ids, system=system)
        return history

    assert text_env.parse_tool_call("<request><add>1+2<call>") == ("add", "1+2")
    stepped = text_env.step(history_of(("<request><add>1+2<call>", False)))
    assert stepped.last_text_segment == "3<response>"
    assert text_env.task_end_check(stepped, model_turn=False) == (False, False)
    submitted = history_of(("=3<submit>", False))
    assert text_env.task_end_check(submitted) == (False, True)
    assert text_env.task_end_check(history_of(("no call", False))) == (True, True)
    text_env.tasks_end_check([submitted])
    assert (submitted.completed, submitted.truncated) == (True, False)
    text_env.compute_reward([submitted], answer=["3"])
    assert submitted.reward == 1.0
    before = len(stepped.tokens)
    text_env.generate([stepped, submitted])
    assert len(stepped.tokens) > before
    text_env.close()


def test_text_history(chatml_tokenizer):
    history = TextHistory("Hello ", torch.tensor([5, 6]), system=True)
    history.append_segment("world", torch.tensor([7]), system=False)
    assert (history.text_spans, history.token_spans) == ([(0, 6), (6, 11)], [(0, 2), (2, 3)])
    assert history.system_spans == [True, False]
    query, response, mask = history.split_query_response_tokens()
    assert (query.tolist(), response.tolist(), mask.tolist()) == ([5, 6], [7], [1])
    with pytest.raises(ValueError, match="needs text and tokens"):
        history.append_segment("", torch.tensor([1]))
    with pytest.raises(ValueError, match="as many log-probs"):
        history.append_segment("x", torch.tensor([1]), log_probs=torch.zeros(2))
    history.complete(truncated=True)
    console = Console(file=io.StringIO(), width=60)
    history.show_text(show_legend=True, console=console)
    history.show_tokens(chatml_tokenizer, console=console)
    assert "Hello world" in console.file.getvalue()
