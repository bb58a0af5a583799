# Checks inside real engines and routers, which come from PyPI or a directory that a variable names

# Where `make check-vllm` keeps its virtual environment.
VLLM_VENV ?= $O/vllm-venv
SGLANG_VENV ?= $O/sglang-venv
LMCACHE_VENV ?= $O/lmcache-venv
ROUTERS_VENV ?= $O/routers-venv
TRANSFORMERS_VENV ?= $O/transformers-venv

# VLLM_NEWER=VERSION: that vLLM's Python over the kernels of the one in VLLM_VENV.
VLLM_USED = $(or $(VLLM_PYTHON),$(abspath $(VLLM_VENV))$(if $(VLLM_NEWER),-$(VLLM_NEWER))/bin/python)
VLLM_ENV = UCMD=$(abspath $O)/ucmd UCMCTL=$(abspath $O)/ucmctl UCMCLIENT_LIB=$(abspath $O)/$(SO) VLLM_PYTHON=$(VLLM_USED)

check-vllm: setup-build ## the connector in a real vLLM, which is fetched from PyPI (some GB) into VLLM_VENV; VLLM_PYTHON=python names one that has it
	+@$(SUBMAKE) all $O/decode_kernels.so
	$(if $(VLLM_PYTHON),,tests/setup/vllm.sh $(VLLM_VENV))
	$(if $(VLLM_PYTHON),,$(if $(VLLM_NEWER),tests/setup/vllm_newer.sh $(VLLM_VENV)-$(VLLM_NEWER) $(abspath $(VLLM_VENV))/bin/python $(VLLM_NEWER)))
	$(VLLM_ENV) /usr/bin/python3 -B tests/engines/vllm/check_vllm.py
	$(VLLM_ENV) /usr/bin/python3 -B tests/engines/vllm/check_hybrid.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/engines/vllm/check_packed.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/engines/vllm/check_chunks.py
	$(VLLM_ENV) PYTHONHASHSEED=0 $(VLLM_USED) -B tests/engines/vllm/check_vllm_unit.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/engines/vllm/check_vllm_weights.py
	$(VLLM_ENV) PYTHONHASHSEED=0 $(VLLM_USED) -B tests/engines/vllm/check_chunks_random.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/engines/vllm/check_vllm_events.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/engines/offload/check_tier.py
	$(VLLM_ENV) /usr/bin/python3 -B tests/engines/vllm/check_sparse.py
	$(VLLM_ENV) $(VLLM_USED) -B tests/engines/vllm/check_sparse_rows.py
	$(VLLM_ENV) /usr/bin/python3 -B tests/engines/vllm/check_sparse_steps.py

check-sglang: setup-build ## the storage in SGLang's own code, which is fetched from PyPI (some GB); SGLANG_PYTHON=python names one that has it
	+@$(SUBMAKE) all
	$(if $(SGLANG_PYTHON),,tests/setup/venv.sh $(SGLANG_VENV) sglang.srt.mem_cache.pool_host.mha sglang==$(or $(SGLANG_VERSION),0.5.23))
	for file in check_sglang check_sglang_tree; do \
	    UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	        $(or $(SGLANG_PYTHON),$(abspath $(SGLANG_VENV))/bin/python) -B tests/engines/sglang/$$file.py || exit 1; \
	done

check-lmcache: setup-build ## the adapter in LMCache's own code, which is fetched from PyPI (some GB); LMCACHE_PYTHON=python names one that has it
	+@$(SUBMAKE) all
	$(if $(LMCACHE_PYTHON),,tests/setup/lmcache.sh $(LMCACHE_VENV))
	UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	    $(or $(LMCACHE_PYTHON),$(abspath $(LMCACHE_VENV))/bin/python) -B tests/engines/lmcache/check_lmcache.py

check-ucm: setup-build ## the stores in UCM's own code, from PyPI; UCM_SOURCE=DIRECTORY: a checkout, with its programs for stores; VLLM_PYTHON=python names a Python that has vLLM
	+@$(SUBMAKE) all
	$(if $(VLLM_PYTHON),,tests/setup/vllm.sh $(VLLM_VENV))
	$(if $(UCM_SOURCE),,tests/setup/ucm.sh $O/ucm)
	UCM_SOURCE=$(or $(UCM_SOURCE),$(abspath $O)/ucm) UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	    $(or $(VLLM_PYTHON),$(abspath $(VLLM_VENV))/bin/python) -B tests/engines/ucm/check_ucm.py

check-routers: setup-build ## what ucmevents publishes, read by Dynamo's indexer, from PyPI, and by vLLM's decoder if VLLM_PYTHON names a Python that has it
	+@$(SUBMAKE) all
	tests/setup/venv.sh $(ROUTERS_VENV) zmq ai-dynamo-runtime==$(or $(DYNAMO_VERSION),1.6.1) pyzmq msgpack
	UCMD=$(abspath $O)/ucmd UCMEVENTS=$(abspath $O)/ucmevents $(abspath $(ROUTERS_VENV))/bin/python -B tests/engines/routers/check_routers.py

check-vllm-gpu: setup-build ## models of each kind and sparse decoding in a real vLLM on a GPU, or two; VLLM_PYTHON=python names one that has vLLM
	$(if $(HAVE_CUDA),,@echo "CUDA toolkit not found: the GPU's kernels can't be built"; exit 1)
	+@$(SUBMAKE) all
	for file in check_models_gpu check_sparse_gpu; do \
	    UCMD=$(abspath $O)/ucmd UCMCTL=$(abspath $O)/ucmctl UCMCLIENT_LIB=$(abspath $O)/$(SO) UCMCLIENT_CUDA_LIB=$(abspath $O)/$(CUDA_SO) \
	        $(or $(VLLM_PYTHON),python3) -B tests/engines/vllm/$$file.py || exit 1; \
	done

check-transformers: setup-build ## chunks in models of transformers, which PyPI has, with torch (some GB); TRANSFORMERS_PYTHON=python names one that has them
	+@$(SUBMAKE) all
	$(if $(TRANSFORMERS_PYTHON),,tests/setup/venv.sh $(TRANSFORMERS_VENV) transformers torch 'transformers>=5' accelerate numpy)
	UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	    $(or $(TRANSFORMERS_PYTHON),$(abspath $(TRANSFORMERS_VENV))/bin/python) -B tests/engines/transformers/check_transformers.py

.PHONY: check-transformers check-vllm check-vllm-gpu check-sglang check-lmcache check-ucm check-routers
