# Tests: how they are built and run
# tests/check.sh has the phases.

FUZZ_SRC   := $(wildcard tests/fuzz/fuzz_*.c)
# A directory with test_*.c is a module, and one program, build/check/MODULE, of all its sources; a test is run by name:
# build/check/cache --filter cache_space/. A new file, or a new directory, needs no change here.
TEST_SRC := $(wildcard tests/unit/*/test_*.c tests/integration/test_*.c tests/integration/*/test_*.c tests/fault/test_*.c)
# Tests of GPU code run over a driver that they bring.
TEST_SRC := $(if $(HAVE_CUDA),$(TEST_SRC),$(filter-out tests/unit/cuda/%,$(TEST_SRC)))
# SUITES=marked: what `make check` runs under a sanitizer, in build/.../marked. A test file names its sanitizers in a line of
# its own, /* Sanitizers: address, thread */; those of tests/unit run under AddressSanitizer without it.
SUITES ?= all
ifeq ($(SUITES),marked)
SAN_NAME  := $(firstword $(subst $(comma), ,$(SAN)))
TEST_SRC  := $(sort $(if $(filter address,$(SAN_NAME)),$(filter tests/unit/%,$(TEST_SRC))) \
                    $(shell grep -lE '^/\* Sanitizers:.* $(SAN_NAME)\b' $(TEST_SRC)))
endif
TEST_MODULES := $(patsubst tests/%/,%,$(sort $(dir $(TEST_SRC))))
TEST_DIR   := $O/$(if $(filter marked,$(SUITES)),marked,check)
TESTS      := $(addprefix $(TEST_DIR)/,$(notdir $(TEST_MODULES)))
MOONCAKE_VENV ?= $O/mooncake-venv

# What runs in full of tests/long_suites: what changed, or topics that the command line names.
TOPICS := encoding sparse blend connector gate
LONG   ?= $(shell tests/changed.sh)

check: setup-check ## the tests: whole programs, units under ASan+UBSan; hostile ones and threads under ASan and TSan, too; and a short fuzz run
	+@LONG='$(LONG)' tests/check.sh '$(SUBMAKE)' system asan tsan fuzz

check-plain: setup-check ## the tests without sanitizers only
	+@LONG='$(LONG)' tests/check.sh '$(SUBMAKE)' plain

check-long: setup-check ## the long suites of encodings, sparse decoding, blend, the vLLM connector and bench-gate, in full (LONG=TOPIC)
	+@LONG='$(if $(filter command line,$(origin LONG)),$(LONG),$(TOPICS))' tests/check.sh '$(SUBMAKE)' long

check-asan: setup-check ## the tests under ASan+UBSan only
	+@tests/check.sh '$(SUBMAKE)' asan

check-tsan: setup-check ## the tests under TSan only
	+@tests/check.sh '$(SUBMAKE)' tsan

check-kill: setup ## 2,000 rounds of kills and 2,000 of power failures (ROUNDS=N)
	+@$(SUBMAKE) all build-tests && tests/check_kill.sh $O

check-hosts: setup ## three hosts and what they share (KIND='nfs directory s3 mooncake') die at random under load, ten minutes each (SECONDS_LONG=N)
	+@$(SUBMAKE) all
	set -e; for kind in $(or $(KIND),nfs directory s3 mooncake); do \
	    UCMD=$O/ucmd UCM_MOONCAKE_PYTHON=$(abspath $(MOONCAKE_VENV))/bin/mooncake-python UCM_HOSTS_KIND=$$kind UCM_HOSTS_SECONDS=$(or $(SECONDS_LONG),600) /usr/bin/python3 -B tests/fault/test_hosts.py; done

check-mooncake: setup ## roots that are Mooncake stores, with a real master; its client is fetched from PyPI (46 MB) into MOONCAKE_VENV
	+@$(SUBMAKE) all $O/check/mooncake
	tests/setup/mooncake.sh $(MOONCAKE_VENV)
	UCM_MOONCAKE_PYTHON=$(abspath $(MOONCAKE_VENV))/bin/mooncake-python UCMD=$(abspath $O)/ucmd \
	    $O/check/mooncake --timeout 120 -j1
	UCM_MOONCAKE_PYTHON=$(abspath $(MOONCAKE_VENV))/bin/mooncake-python UCMD=$(abspath $O)/ucmd UCMCTL=$(abspath $O)/ucmctl \
	    /usr/bin/python3 -B tests/integration/test_shared_mooncake_hosts.py

check-system: ## the shipped units, an operator's day under a real systemd, and the image; needs root (TEST=Class.test: one)
	@$(if $(filter no,$(SETUP)),,tests/setup/packages.sh $(PKG_DEB) debootstrap lintian util-linux python3-swift $(PKG_IMAGE))
	@$(TRY_MOONCAKE)
	+@$(SUBMAKE) all
	+@$(SUBMAKE) deb
	lintian --allow-root --fail-on error,warning $O/deb/*.changes
	tests/system/root.sh $O/system
	UCM_MOONCAKE_PYTHON=$(abspath $(MOONCAKE_VENV))/bin/mooncake-python UCM_SYSTEM_BUILD=$(abspath $O)/system /usr/bin/python3 -B tests/system/check_system.py $(TEST)
	$(if $(TEST),,UCM_DEB=$(abspath $O)/deb UCM_SYSTEM_BUILD=$(abspath $O)/system /usr/bin/python3 -B tests/system/check_deb.py)
	$(if $(TEST),,UCM_DEB=$(abspath $O)/deb UCM_SYSTEM_BUILD=$(abspath $O)/system /usr/bin/python3 -B tests/system/check_day.py)
	$(if $(TEST),,UCM_DEB=$(abspath $O)/deb UCM_SYSTEM_BUILD=$(abspath $O)/system /usr/bin/python3 -B tests/system/check_image.py || [ $$? = 77 ])

check-chroot: ## `make demo` and `make check` in a bare Debian 12; needs root
	tests/setup/chroot.sh

bench-gate: setup-build ## is this tree slower than the commit in tests/gate/base? 5: undecided, 6: slower (BASE=COMMIT)
	+@$(SUBMAKE) all $O/gate-worker
	+@old=$$(tests/gate/base.sh '$(SUBMAKE)' $O/gate '$(BASE)') && \
	    python3 -B tests/gate/gate.py --old "$$old" --new $O --worker $O/gate-worker --dir "$${BENCH_DIR:-/var/tmp}"

fuzz: setup ## each fuzz target for FUZZ_SECONDS (60)
	+@FUZZ_SECONDS=$${FUZZ_SECONDS:-60} tests/check.sh '$(SUBMAKE)' fuzz

fuzz-live: setup ## tenants of daemons under AddressSanitizer look for each other's bytes (SECONDS_LONG=600, SEED=N, JOBS=N daemons)
	+@$(SUBMAKE) -s BUILD=build/clang FATBINS=build/fatbin 'CC=$(CLANG)' SAN=address,undefined,fuzzer-no-link 'CFLAGS=-O0 -g1' build/clang/san-address/ucmd
	UCMD=build/clang/san-address/ucmd /usr/bin/python3 -B tests/fuzz/live/fuzz_live.py --seconds $(or $(SECONDS_LONG),600) --seed $(or $(SEED),0) --jobs $(JOBS)

# With counters in them, gcc knows less of kernels, and warns of variables that are initialized.
COUNTED := --coverage -Wno-maybe-uninitialized
coverage: setup-check ## lines and branches that check-plain runs with all long suites, by directory (FILES=yes: by file)
	@mkdir -p $(BUILD)/coverage && find $(BUILD)/coverage -name '*.gcda' -delete
	-+@$(SUBMAKE) BUILD=$(BUILD)/coverage LONG='$(TOPICS)' CFLAGS='-O0 -g $(COUNTED)' LDFLAGS=--coverage check-plain
	@/usr/bin/python3 -B tests/coverage.py $(BUILD)/coverage $(if $(FILES),--files)

# Functions are counted in a daemon without CUDA, in a directory of its own.
SHAPE_BUILD := BUILD=$(BUILD)/shape NVCC= CFLAGS='-O0 -fno-inline $(COUNTED)' LDFLAGS=--coverage
shape: setup-build ## the tree's measures: what a request runs, who knows which feature, circles of files, sizes
	+@$(SUBMAKE) -s all
	+@$(SUBMAKE) -s $(SHAPE_BUILD) $(BUILD)/shape/ucmd
	@UCMCLIENT_LIB=$(abspath $O)/$(SO) UCMCTL=$(abspath $O)/ucmctl /usr/bin/python3 -B tests/shape/shape.py --built $O --counted $(BUILD)/shape

lint: setup ## formatting, a clang build, cppcheck where it is installed
	+@tests/lint.sh '$(SUBMAKE)' '$(CLANG)'

# ---- rules ----

# Optimising the code of Criterion's macros takes longer than running it. (override: also after
# CFLAGS of a command line.)
TEST_CFLAGS := -O0 -U_FORTIFY_SOURCE
# Memory that tests hand over has red zones. Otherwise only the product is watched or counted,
# because doing that for tests would double the time to compile them.
TEST_SANFLAGS := $(patsubst -fsanitize=address%,-fsanitize=address,$(SANFLAGS))
$O/obj/tests/unit/%.o $O/obj/tests/integration/%.o $O/obj/tests/fault/%.o: override CFLAGS += $(TEST_CFLAGS)
$O/obj/tests/unit/%.o $O/obj/tests/integration/%.o $O/obj/tests/fault/%.o: override SANFLAGS := $(TEST_SANFLAGS)
# Except tests whose own loops take longer than a compiler.
$(patsubst %,$O/obj/tests/unit/%.o,$(addprefix sparse/test_,attend attend_stop) $(addprefix encoding/test_,encoding_forms rope) base/test_fair_ways observe/test_reuse): \
    override CFLAGS += -O1
# And the product under a sanitizer, for modules whose loops are long.
ifneq ($(SAN),)
$(patsubst %,$O/obj/%.o,daemon/base/% daemon/index/% daemon/learn/% daemon/format/% proto/% client/bench/%): override CFLAGS += -O1
endif

# The daemon with the kill points that tests/fault/test_kill.c asks for; never installed.
KILL_OBJ := $(patsubst %.c,$O/obj/kill/%.o,$(shell grep -lsw KILL_POINT $(DAEMON_SRC) $(WIRE_SRC)))
$O/obj/kill/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS_ALL) -DUCMD_KILL_POINTS -c $< -o $@
$O/ucmd-kill: $(call obj,daemon/main.c) $(KILL_OBJ) \
              $(filter-out $(patsubst $O/obj/kill/%,$O/obj/%,$(KILL_OBJ)),$(DAEMON_OBJ)) $(BUILD_OBJ)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(DAEMON_LIBS) -o $@
# The disk that tests/fault/test_power.c puts beneath it.
DISK_OBJ := $(call obj,$(wildcard tests/fault/disk/*.c))
$O/volatile_disk.so: $(DISK_OBJ)
	$(call say,LINK)
	$(Q)$(CC) -shared -pthread $(LDFLAGS) $^ -ldl -o $@
# What tests/fault/test_disk.c preloads into a daemon; without sanitizers, which the daemon brings.
$O/ucmd-inject.so: tests/inject/inject.c tests/inject/inject.h
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -std=c11 $(CPPFLAGS_ALL) -fPIC -fvisibility=hidden $(WARN) $(CFLAGS) -shared $< -ldl -o $@
# The wall clock that tests/fault/test_place.c gives a daemon.
$O/clock.so: tests/fault/clock/clock.c
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -std=c11 $(CPPFLAGS_ALL) -fPIC $(WARN) $(CFLAGS) -shared $< -o $@
test-tools: $O/clock.so
# A side of bench-gate: with the client library that the loader finds, and nothing of it within.
GATE_SRC := $(wildcard tests/gate/*.c) $(RIG_SRC)
$O/gate-worker: $(call obj,$(GATE_SRC) $(PROTO_SRC)) $O/$(SO)
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK) $(filter %.o,$^) -L$O -lucmclient -lmsgpackc -lcjson -o $@
# Slows a daemon's answers down, for its tests.
$O/delay.so: tests/inject/delay.c
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(CC) -std=c11 $(CPPFLAGS_ALL) -fPIC -fvisibility=hidden $(WARN) $(CFLAGS) -shared $< -o $@

# The C of kernels/sparse for test_summary_numpy.py and test_select_numpy.py.
$O/sparse_kernels.so: $(call obj,$(wildcard tests/reference/sparse/*.c) kernels/simd/isa.c) $(SPARSE_OBJ)
	$(call say,LINK)
	$(Q)$(CC) -shared -pthread $(LDFLAGS) $^ -o $@

# The same of kernels/encoding, for test_encoding_numpy.py and encoding_case.py.
$O/encoding_kernels.so: $(call obj,$(wildcard tests/reference/encoding/*.c) kernels/simd/isa.c) $(ENCODING_OBJ)
	$(call say,LINK)
	$(Q)$(CC) -shared -pthread $(LDFLAGS) $^ -o $@

# kernels/entries and kernels/attend for the small engine of tests/engines/vllm.
$O/decode_kernels.so: $(call obj,tests/engines/vllm/decode_kernels.c $(SLOTS_SRC) kernels/simd/isa.c) $(ATTEND_OBJ) $(SPARSE_OBJ)
	$(call say,LINK)
	$(Q)$(CC) -shared -pthread $(LDFLAGS) $^ -lm -o $@

# A runner of our own takes the place of Criterion's main: see its head.
RUNNER := $(call obj,$(wildcard tests/runner/*.c))
# Loops over a test's memory: see bytes.h.
$O/obj/tests/runner/bytes.o: override CFLAGS += -O2
$O/obj/tests/runner/bytes.o: override SANFLAGS :=

# What modules need beyond their own sources and the archives. A program gets only what it names of
# those.
TEST_OBJ_tools := $(BENCH_OBJ)
TEST_OBJ_sparse := $(ATTEND_OBJ) $(call obj,$(SLOTS_SRC))
TEST_OBJ_cache := $(call obj,tests/unit/shared_fake.c)
TEST_OBJ_request := $(TEST_OBJ_cache)
TEST_OBJ_shared := $(call obj,daemon/backend/directory/directory.c daemon/backend/directory/uncached.c)
TEST_OBJ_cuda := $(CUDA_CLIENT) $(SPARSE_CUDA_OBJ)
TEST_OBJ_fault := $(call obj,tests/integration/harness.c)
TEST_LIBS_cuda := -Wl,--wrap=job_clock_ms $(addprefix -Wl$(comma)--wrap=ucm_mapping_,info ranges release address)
TEST_LIBS_s3 := -lcurl
TEST_LIBS_mooncake := -lcurl

# Sources of a module that are no tests are the tests' helpers. test_program DIRECTORY MODULE
define test_program
$(TEST_DIR)/$(2): $(call obj,$(filter-out tests/$(1)/test_%,$(wildcard tests/$(1)/*.c)) $(filter tests/$(1)/test_%,$(TEST_SRC))) \
                  $(TEST_OBJ_$(2)) $(RUNNER) $O/libucmclient.a $O/libucmdaemon.a
	@mkdir -p $$(@D)
	$$(call say,LINK)
	$$(Q)$$(LINK_TEST) $$^ $$(DAEMON_LIBS) -lcjson $(TEST_LIBS_$(2)) -lcriterion -o $$@
endef
$(foreach module,$(TEST_MODULES),$(eval $(call test_program,$(module),$(notdir $(module)))))

# Fuzz targets are of clang's build with SAN=address,undefined,fuzzer-no-link (tests/check.sh): every object counts branches.
$O/fuzz/fuzz_s3: $(call obj,daemon/backend/s3/xml.c daemon/backend/s3/credentials_parse.c)
FUZZ_LIBS_fuzz_s3 := -lcurl -lexpat
$O/fuzz/%: $O/obj/tests/fuzz/%.o $O/libucmclient.a $O/libucmdaemon.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) -fsanitize=fuzzer $^ $(DAEMON_LIBS) $(FUZZ_LIBS_$*) -lcjson -o $@

build-tests: $(TESTS) test-tools
# The daemon, and the programs with which tests query it.
build-daemon: $O/ucmd $O/ucmctl $(if $(HAVE_ZMQ),$O/ucmevents) $(BACKENDS)
# Other programs that tests use.
test-tools: $O/ucmd-inject.so $(if $(filter thread,$(SAN)),,$O/ucmd-kill) $(if $(SAN),,$O/volatile_disk.so $O/sparse_kernels.so $O/encoding_kernels.so $O/decode_kernels.so $O/gate-worker $O/delay.so)
build-fuzz: $(patsubst tests/fuzz/%.c,$O/fuzz/%,$(FUZZ_SRC))

# Tests read their lists from here.
list-tests:
	@echo $(TESTS)
list-fatbins:
	@echo $(ALL_FATBINS)
list-fuzz:
	@echo $(patsubst tests/fuzz/%.c,$O/fuzz/%,$(FUZZ_SRC))

.PHONY: check check-plain check-long check-asan check-tsan check-kill check-hosts check-mooncake check-system check-chroot bench-gate fuzz fuzz-live coverage shape lint \
        build-tests build-daemon test-tools build-fuzz list-tests list-fuzz list-fatbins
