"""Kernels that a GPU runs for one layer of a step of drawing, counted without a GPU.

    python benchmarks/gpu_kernels.py [--rows 64] [--show]

PyTorch compiles for an H100 that is not there: tensors have shapes and no values, and two small
libraries, made here by the C compiler, answer in the driver's place. It stops when the code is
written, before it would be launched, and counts what the code launches. It takes a build of PyTorch
for CUDA, and reaches into its inside: tried with 2.11. A row is one layer of Qwen3-0.6B:

    products    of matrices, by cuBLAS
    compiled    kernels of Triton
    attention   calls of flash attention; one over slots also copies the query and its result
"""

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import torch
from gpu import SHAPES
from torch._subclasses.fake_tensor import FakeTensorMode

RUNTIME: Final = """
int cudaGetDevice(int *device) { *device = 0; return 0; }
int cudaSetDevice(int device) { return 0; }
int cudaGetDeviceCount(int *count) { *count = 1; return 0; }
int cudaDriverGetVersion(int *version) { *version = 13000; return 0; }
int cudaGetLastError(void) { return 0; }
int cudaPeekAtLastError(void) { return 0; }
int cudaDeviceGetAttribute(int *value, int name, int device) { *value = 0; return 0; }
"""
DRIVER: Final = """
int cuInit(unsigned flags) { return 0; }
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    *flags = 0; *active = 1; return 0;
}
"""
H100: Final = types.SimpleNamespace(
    **{"name": "NVIDIA H100 80GB HBM3", "major": 9, "minor": 0, "multi_processor_count": 132},
    **{"total_memory": 80 << 30, "warp_size": 32, "max_threads_per_multi_processor": 2048},
    **{"regs_per_multiprocessor": 65536, "shared_memory_per_block_optin": 232448},
    **{"shared_memory_per_block": 49152, "shared_memory_per_multiprocessor": 233472},
    **{"max_threads_per_block": 1024, "L2_cache_size": 50 << 20, "gcnArchName": ""},
)
LAUNCHES: Final = (r"extern_kernels\.\w*mm\(", r"\.run\(", r"= torch\.ops\.torchrl_agents\.")
"""Products, compiled kernels and attention, as the code that PyTorch writes calls them."""
STARTED: Final = "GPU_KERNELS_STARTED"


class Written(Exception):
    """The code of a graph is there."""


def start_again() -> None:
    """Go on in a process to which the libraries answer."""
    with tempfile.TemporaryDirectory() as folder:
        for name, code in (("libcudart_stub.so", RUNTIME), ("libcuda.so.1", DRIVER)):
            source = Path(folder, "source.c")
            source.write_text(code)
            to = ["-Wl,-soname," + name, "-o", str(Path(folder, name)), str(source)]
            subprocess.run(["cc", "-shared", "-fPIC", *to], check=True)
        more = {STARTED: "1", "LD_PRELOAD": str(Path(folder, "libcudart_stub.so"))}
        environment = {**os.environ, **more, "LD_LIBRARY_PATH": folder}
        again = subprocess.run([sys.executable, *sys.argv], env=environment, check=False)
        sys.exit(again.returncode)


@contextlib.contextmanager
def pretended_gpu(codes: list[str]) -> Iterator[None]:
    """Inside, what is compiled for a GPU is written to a list, and raises then."""
    from torch._dynamo import device_interface
    from torch._inductor import config
    from torch._inductor.fx_passes import fuse_attention, misc_patterns, pad_mm
    from torch._inductor.graph import GraphLowering
    from torch._subclasses import fake_tensor
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    codegen, target = GraphLowering.codegen, GPUTarget("cuda", 90, 32)

    def written(self: Any) -> Any:
        codes.append(codegen(self)[0].value)
        raise Written

    def nothing(*_: Any) -> None:
        return None

    interface = device_interface.CudaInterface
    answers: dict[Any, dict[str, Any]] = {
        torch.cuda: {
            "is_available": lambda: True,
            "device_count": lambda: 1,
            "current_device": lambda: 0,
            "set_device": nothing,
            "synchronize": nothing,
            "_lazy_init": nothing,
            "get_device_properties": lambda *_: H100,
            "get_device_capability": lambda *_: (9, 0),
            "get_rng_state": lambda *_: torch.zeros(1),
            "set_rng_state": nothing,
            "_exchange_device": lambda *_: 0,
            "_maybe_exchange_device": lambda *_: 0,
        },
        torch.accelerator: {"is_available": lambda: False},
        interface: {
            "is_available": staticmethod(lambda: True),
            "current_device": staticmethod(lambda: 0),
            "get_compute_capability": staticmethod(lambda *_: 90),
            "get_device_properties": staticmethod(lambda *_: H100),
        },
        interface.Worker: {"get_device_properties": staticmethod(lambda *_: H100)},
        fake_tensor: {"init_gpu_context": nothing},
        fuse_attention: {"_sfdp_init": nothing},
        pad_mm: {"_pad_mm_init": nothing},
        misc_patterns: {"_misc_patterns_init": nothing},
        GraphLowering: {"codegen": written},
        driver: {"_active": types.SimpleNamespace(get_current_target=lambda: target)},
    }
    with contextlib.ExitStack() as stack:
        for where, names in answers.items():
            for name, answer in names.items():
                stack.enter_context(mock.patch.object(where, name, answer))
        stack.enter_context(config.patch(compile_threads=1, fx_graph_cache=False))
        yield


def model_without_values(dtype: torch.dtype, matrices: torch.dtype) -> Any:
    """One layer of Qwen3-0.6B on the pretended GPU, its matrices perhaps of another type."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from torchrl_modules.scoring.packed_attention import use_packed_attention

    shape = {**SHAPES["qwen3-0.6b"], "num_hidden_layers": 1, "vocab_size": 1000}
    with torch.device("meta"):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape)).eval().requires_grad_(False)
    for module in model.modules():
        kind = matrices if type(module) is torch.nn.Linear else dtype
        for name, x in [*module.named_parameters(recurse=False)]:
            placed = torch.empty(x.shape, dtype=kind, device="cuda")
            setattr(module, name, torch.nn.Parameter(placed, requires_grad=False))
        for name, x in [*module.named_buffers(recurse=False)]:
            setattr(module, name, torch.empty(x.shape, dtype=x.dtype, device="cuda"))
    use_packed_attention(model)
    return model


def step_of(model: Any, num_rows: int, *, shares: bool) -> None:
    """Draw a token of each row, as far as compiling its layer."""
    from torchrl_modules.compiled_layers import compile_layers
    from torchrl_modules.engines import slot_reader
    from torchrl_modules.scoring.slot_attention import PrefixPlan

    config, num_columns, num_slots, num_prefixes = model.config, 1088, num_rows + 2, 9

    def put(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="cuda")

    shape = (num_slots, num_columns, config.num_key_value_heads, config.head_dim)
    like = types.SimpleNamespace(keys=put(*shape, dtype=torch.bfloat16).transpose(1, 2))
    like.values = like.keys
    reader = slot_reader.SlotReader(model)
    layer = slot_reader._SlotLayer(reader._places, like)
    layer.keys = like.keys
    layer.values = put(*shape, dtype=torch.bfloat16).transpose(1, 2)
    for buffer in (layer.keys, layer.values):
        for fixed in (1, 3):
            torch._dynamo.mark_static(buffer, fixed)
    reader._layers = [layer]
    reader._given = {"past_key_values": slot_reader.Cache(layers=[layer]), "use_cache": True}
    places, small = reader._places, torch.int32
    places.lengths, places.shared, places.slots = (put(num_rows) for _ in range(3))
    places.numbers, places.starts = (put(num_slots + 1, dtype=small) for _ in range(2))
    places.num_columns, places.is_varlen = num_columns, True
    if shares:
        ends = [put(num_prefixes + more, dtype=small) for more in (1, 1, 0)]
        rows = (put(num_rows), put(num_rows), put(num_rows, dtype=torch.bool))
        places.prefixes = PrefixPlan(*rows, *ends)
    compile_layers(model, True)
    reader._step(put(num_rows), is_masked=True)


CASES: Final = {
    "bfloat16": (torch.bfloat16, torch.bfloat16, False),
    "bfloat16, groups share prompts": (torch.bfloat16, torch.bfloat16, True),
    "autocast, matrices cast once": (torch.float32, torch.bfloat16, False),
    "autocast, cast for each token": (torch.float32, torch.float32, False),
}
"""Type of a model, and of its matrices, and whether rows share prefixes."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--show", action="store_true", help="print the code")
    options = parser.parse_args()
    if torch.version.cuda is None:
        sys.exit("gpu_kernels.py: this PyTorch is not built for CUDA, so it writes no such code.")
    if STARTED not in os.environ:
        start_again()
    print(f"{'one layer, ' + str(options.rows) + ' rows':34} products  compiled  attention")
    for name, (dtype, matrices, shares) in CASES.items():
        codes: list[str] = []
        torch._dynamo.reset()
        with pretended_gpu(codes), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            model = model_without_values(dtype, matrices)
            mixed = torch.autocast("cuda", torch.bfloat16, enabled=dtype is torch.float32)
            with mixed, warnings.catch_warnings(), contextlib.suppress(Exception):
                warnings.simplefilter("ignore")  # that nothing is compiled, which is stopped
                step_of(model, options.rows, shares=shares)
        layers = [code for code in codes if "slot_attention" in code]
        if len(layers) != 1:
            sys.exit(f"gpu_kernels.py: {len(layers)} layers were compiled for {name!r}, not one.")
        calls = layers[0][layers[0].index("def call(") :]
        counts = [len(re.findall(pattern, calls)) for pattern in LAUNCHES]
        print(f"{name:34} {counts[0]:8} {counts[1]:9} {counts[2]:10}")
        if options.show:
            print(calls)


if __name__ == "__main__":
    main()
