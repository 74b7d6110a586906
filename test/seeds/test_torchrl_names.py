"""Every public name of TorchRL's LLM layer is under the matching package."""

from importlib import import_module

import pytest

NAMES = {
    "torchrl_data": "History ContentBase add_chat_template",
    "torchrl_modules": """LLMWrapperBase TransformersWrapper vLLMWrapper ChatHistory Text LogProbs
        Masks Tokens LLMOnDevice make_vllm_worker stateless_init_process_group vLLMWorker""",
    "torchrl_envs": """ChatEnv DatasetChatEnv GSM8KEnv make_gsm8k_env GSM8KPrepareQuestion
        GSM8KRewardParser IFEvalEnv IfEvalScorer IFEvalScoreData LLMEnv LLMHashingEnv
        MLGymWrapper make_mlgym AddThinkingPrompt
        BrowserTransform DataLoadingPrimer KLComputation
        KLRewardTransform MCPToolTransform PolicyVersion PythonInterpreter RetrieveKL
        RetrieveLogProb TemplateTransform Tokenizer as_nested_tensor as_padded_tensor""",
    "objectives": "GRPOLoss GRPOLossOutput MCAdvantage SFTLoss SFTLossOutput TopKRewardSelector",
    "collectors": "LLMCollector vLLMUpdater",
}


@pytest.mark.parametrize("package", NAMES)
def test_the_names_are_there_and_listed(package):
    module = import_module(package)
    for name in NAMES[package].split():
        assert getattr(module, name).__name__ == name
        assert name in module.__all__


@pytest.mark.parametrize(
    ("path", "package", "names"),
    [
        ("torchrl_data.chat", "torchrl_data", "ContentBase History add_chat_template"),
        ("torchrl_modules.policies", "torchrl_modules", "TransformersWrapper vLLMWrapper"),
        ("torchrl_envs.transforms", "torchrl_envs", "PolicyVersion PythonInterpreter Tokenizer"),
        ("collectors.weight_update", "collectors", "vLLMUpdater"),
    ],
)
def test_the_paths_of_torchrls_documents_lead_to_the_same_names(path, package, names):
    module = import_module(path)
    for name in names.split():
        assert name in module.__all__
        assert getattr(module, name) is getattr(import_module(package), name)
    with pytest.raises(AttributeError, match="has no attribute 'Missing'"):
        module.Missing  # noqa: B018
