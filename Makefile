# ucmd: a cache for the KV of LLM inference
#
#   make                  daemon, client library, ucmctl, ucm-bench and ucmevents, into build/
#   make demo             the main job, end to end on this machine
#   make check            every test
#   sudo make install     what `make` built; `make deb` makes packages instead
#   make help             all that can be made
#
#   SAN=address,undefined | thread   with sanitizers, into a directory of its own
#   CC=, CFLAGS=, BUILD=             compiler, optimisation, directory
#   GPU=no                           without GPU support, though there is nvcc
#   PREFIX=, DESTDIR=, SYSCONFDIR=   for install
#   SETUP=no                         never install packages
#   V=1                              show whole command lines
#
# Sources are found by directory: a new .c or test needs no change here. This file has the settings, the programs and the
# libraries; the rest is next to what it is about:
#
#   kernels/kernels.mk       C for each instruction set      tests/tests.mk             tests and what they run
#   kernels/cuda.mk          GPU code, if there is nvcc      tests/gpu/gpu.mk           those that need a GPU
#   config/install.mk        install, deb, wheel             tests/engines/engines.mk   those in real engines
#   tests/setup/setup.mk     packages that builds need       tests/studies/studies.mk   measurements and studies
#   docs/docs.mk             generated pages

VERSION    := 0.1.0
SO_VERSION := 0
# Of what is built; a packager without a checkout names it.
COMMIT     ?= $(or $(shell git describe --always --dirty --abbrev=12 --exclude '*' 2>/dev/null),unknown)
CC         := $(if $(filter default,$(origin CC)),gcc,$(CC))
CLANG      ?= clang
comma      := ,
.DEFAULT_GOAL := all

# A plain `make` uses all cores; make's own -j goes over it.
JOBS ?= $(shell nproc)
ifeq ($(MAKELEVEL)$(or $(MAKECMDGOALS),all),0all)
MAKEFLAGS += -j$(JOBS)
endif

V ?= 0
Q := $(if $(filter 0,$(V)),@)
silent = $(findstring s,$(filter-out --%,$(firstword $(MAKEFLAGS))))
say = $(if $(filter 0,$(V)),$(if $(silent),,@printf '  %-5s %s\n' $(1) $@))

SAN   ?=
BUILD ?= build
ifneq ($(SAN),)
O        := $(BUILD)/san-$(firstword $(subst $(comma), ,$(SAN)))
SANFLAGS := -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
CFLAGS   ?= -O1 -g
else
O        := $(BUILD)
SANFLAGS :=
# -g1 where nobody opens a debugger: the lines of a backtrace.
SYMBOLS  ?= -g
CFLAGS   ?= -O2 $(SYMBOLS) -D_FORTIFY_SOURCE=2 -fstack-protector-strong
endif

WARN   := -Wall -Wextra -Wpedantic -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
          -Wpointer-arith -Wvla -Wno-format-zero-length
CPPFLAGS_ALL = -D_GNU_SOURCE -DUCM_VERSION='"$(VERSION)"' -DUCM_SO_VERSION='"$(SO_VERSION)"' -I. -Iclient/include $(CUDA_CPPFLAGS) $(CPPFLAGS)
CFLAGS_ALL   = -std=c11 $(CPPFLAGS_ALL) -fPIC -fvisibility=hidden -pthread $(WARN) $(CFLAGS) $(SANFLAGS) -MMD -MP
LINK         = $(CC) $(SANFLAGS) -pthread -pie -Wl,-z,relro,-z,now $(LDFLAGS)
# A hundred and eighty programs that nobody installs, each with all of the archives: lld, where the compiler has it, links them in a fifth of the time.
LLD         := $(if $(filter LLD,$(shell $(CC) -fuse-ld=lld -Wl,--version 2>/dev/null)),-fuse-ld=lld)
LINK_TEST    = $(LINK) $(LLD)

DAEMON_LIBS = -luv -luring -lmsgpackc -lcrypto -lxxhash -lyaml -lsystemd -lmicrohttpd -ldl -lm $(CUDA_LIBS)
CLIENT_LIBS = -lmsgpackc -lcrypto -lm
# ucmevents alone has libzmq; without its header it is left out. Debian's, or what lies in another prefix.
ZMQ_PREFIX ?= /usr
HAVE_ZMQ   := $(wildcard $(ZMQ_PREFIX)/include/zmq.h)
ZMQ_FLAGS   = $(if $(filter-out /usr,$(ZMQ_PREFIX)),$(addprefix -L,$(wildcard $(ZMQ_PREFIX)/lib $(ZMQ_PREFIX)/lib/*-linux-gnu)) -Wl$(comma)--allow-shlib-undefined)
ZMQ_LIBS    = $(if $(HAVE_ZMQ),-lzmq)
CTL_LIBS    = $(CLIENT_LIBS) -lcjson -lxxhash

# Recursive calls use all cores when the caller gave no -j.
SUBMAKE = $(MAKE) --no-print-directory $(if $(findstring -j,$(MAKEFLAGS)),,-j$(JOBS))

obj = $(patsubst %.c,$O/obj/%.o,$(1))
SO   := libucmclient.so
LIBS := $O/libucmclient.a $O/$(SO).$(VERSION) $O/$(SO).$(SO_VERSION) $O/$(SO)

include kernels/kernels.mk
include kernels/cuda.mk
include tests/setup/setup.mk

# ---- sources ----

# build.c is for programs, not for libraries.
PROTO_SRC  := $(filter-out proto/build.c,$(wildcard proto/*.c proto/*/*.c))
DAEMON_SRC := $(filter-out daemon/main.c daemon/backend/% $(OTHER_CUDA),$(wildcard daemon/*.c daemon/*/*.c daemon/*/*/*.c))
# Packets between the daemon and processes of roots, and targets; and the library for those, which has them too.
WIRE_SRC   := $(wildcard daemon/backend/wire*.c) daemon/backend/nfs/target.c
BACKEND_SRC := $(wildcard daemon/backend/*.c)
# daemon/backend/NAME/main.c, with what lies next to it, is the backend ucmd-backend-NAME; BACKEND_LIBS_NAME are the libraries that it needs.
BACKEND_MAIN := $(wildcard daemon/backend/*/main.c)
# daemon/backend/NAME/main.py is one, too.
BACKEND_SCRIPTS := $(wildcard daemon/backend/*/main.py)
BACKEND_LIBS_nfs := -lnfs
BACKEND_LIBS_s3 := -lcurl -lexpat -lcjson -lcrypto
CLIENT_SRC := $(wildcard client/lib/*.c client/lib/*/*.c)
# The tools, but for their mains. ucmctl's offline commands read the NVMe tier's format on disk.
CTL_SRC    := $(filter-out client/ctl/ucmctl.c,$(wildcard client/ctl/*.c)) $(wildcard daemon/format/*.c) daemon/checkpoint/format.c daemon/checkpoint/read.c
BENCH_SRC  := $(filter-out client/bench/ucm_bench.c,$(wildcard client/bench/*.c))
# Of them, what plays workers, for the demo and bench-gate.
RIG_SRC    := $(addprefix client/bench/,copy_agent.c daemon.c figure.c gpu.c pattern.c rig.c) client/ctl/answer.c
EVENTS_SRC := $(if $(HAVE_ZMQ),$(filter-out client/events/ucmevents.c,$(wildcard client/events/*.c)))
DEMO_SRC   := $(wildcard tests/demo/*.c)

DAEMON_OBJ := $(call obj,$(PROTO_SRC) $(KERNEL_SRC) $(WIRE_SRC) $(DAEMON_SRC)) $(SPARSE_OBJ) $(ENCODING_OBJ) $(ROPE_OBJ) $(CUDA_OBJ)
# What only shows metrics is the tools', not every worker's.
SHOWN_SRC  := proto/metrics/exposition.c proto/histogram.c
CLIENT_OBJ := $(call obj,$(filter-out $(SHOWN_SRC),$(PROTO_SRC)) $(CLIENT_SRC) kernels/simd/isa.c) $(SPARSE_OBJ) $(ENCODING_OBJ)

# Made when all of it is built; `make install` compares the sources with it.
BUILT := $O/built
NO_GPU := $(if $(HAVE_CUDA),, without GPU support ($(if $(filter no,$(GPU)),GPU=no,no CUDA toolkit found)))

BACKENDS := $(patsubst daemon/backend/%/main.c,$O/ucmd-backend-%,$(BACKEND_MAIN)) $(patsubst daemon/backend/%/main.py,$O/ucmd-backend-%,$(BACKEND_SCRIPTS))
BINS := $O/ucmd $O/ucmctl $O/ucm-bench $(if $(HAVE_ZMQ),$O/ucmevents)
# Manual pages and completion, of the programs' own --help.
PAGES := $O/pages/made
PAGED := ucmctl ucm-bench ucmd $(if $(HAVE_ZMQ),ucmevents)
EXAMPLES := $(patsubst client/examples/%.c,$O/examples/%,$(wildcard client/examples/*.c))

# ---- for people ----

help: ## what can be made
	@awk -F':.*## ' 'FNR == 1 {part = substr($$0, 3)} \
	    /^[a-z-]+:.*## /{if (part) print "\n" part; part = ""; printf "  make %-19s %s\n", $$1, $$2}' $(filter %akefile %.mk,$(MAKEFILE_LIST))

all: $(LIBS) $(BINS) $(BACKENDS) $(EXAMPLES) $(PAGES) | missing-packages ## daemon, client library, ucmctl, ucm-bench; what `make` alone does
	@touch $(BUILT)
	@$(if $(silent)$(filter-out 0,$(MAKELEVEL)),,echo \
	    'Built $(notdir $(BINS)) and libucmclient in $O/$(NO_GPU). Next: sudo make install, or make demo.')

# In a directory of its own: what it runs, kernels for a GPU only where this host has one, and those that it does not run anyway for one
# instruction set. All of them take longer than all the rest.
demo: setup-build ## the main job, end to end on this machine (TRACE=file replays another trace)
	+@$(SUBMAKE) BUILD=$(BUILD)/demo FATBINS=$(FATBINS) SYMBOLS=-g1 KERNEL_ISA=base $(if $(wildcard /dev/nvidiactl),,GPU=no) run-demo

run-demo: build-demo
	$O/ucm-demo $(TRACE)

build-demo: $O/ucm-demo $O/ucmd $O/ucmctl $(if $(HAVE_CUDA),$(LIBS))

format: ## clang-format over the C files
	git ls-files -co --exclude-standard '*.c' '*.h' | xargs clang-format -i

clean: ## remove the build directory
	rm -rf $(BUILD)

# ---- rules ----

$O/obj/%.o: %.c
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(CFLAGS_ALL) -c $< -o $@

$O/libucmdaemon.a: $(DAEMON_OBJ)
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^
$O/libucmclient.a: $(CLIENT_OBJ)
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^
$O/libucmbackend.a: $(call obj,$(BACKEND_SRC) $(PROTO_SRC))
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^
$(foreach name,$(patsubst daemon/backend/%/main.c,%,$(BACKEND_MAIN)),$(eval $O/ucmd-backend-$(name): $(call obj,$(wildcard daemon/backend/$(name)/*.c))))
$O/ucmd-backend-%: $O/obj/daemon/backend/%/main.o $O/libucmbackend.a
	$(call say,LINK)
	$(Q)$(LINK) $(filter %.o,$^) $(filter %.a,$^) $(BACKEND_LIBS_$*) -lmsgpackc -o $@
$(patsubst daemon/backend/%/main.py,$O/ucmd-backend-%,$(BACKEND_SCRIPTS)): $O/ucmd-backend-%: daemon/backend/%/main.py
	@mkdir -p $(@D)
	$(call say,COPY)
	$(Q)install -m 755 $< $@
$O/obj/client/bench/fatbin.o: client/bench/fatbin.S $(BENCH_FATBIN)
	@mkdir -p $(@D)
	$(call say,CC)
	$(Q)$(CC) $(if $(BENCH_FATBIN),-DUCM_BENCH_FATBIN='"$(BENCH_FATBIN)"') -c $< -o $@
# What tools are made of, and their tests: ucmctl's, which all have, and ucm-bench's.
$O/libucmctl.a: $(call obj,$(CTL_SRC) $(SHOWN_SRC))
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^
$O/libucmbench.a: $(call obj,$(BENCH_SRC)) $O/obj/client/bench/fatbin.o
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^

EXPORTS := $(wildcard client/lib/libucmclient.map)
$O/$(SO).$(VERSION): $(CLIENT_OBJ) $(EXPORTS)
	$(call say,LINK)
	$(Q)$(CC) $(SANFLAGS) -shared -pthread $(if $(SAN),,-Wl,-z,defs) -Wl,-soname,$(SO).$(SO_VERSION) -Wl,-z,relro,-z,now \
	    $(addprefix -Wl$(comma)--no-undefined-version -Wl$(comma)--version-script=,$(EXPORTS)) $(LDFLAGS) $(CLIENT_OBJ) $(CLIENT_LIBS) -o $@
# For hosts without Debian's libraries: the wheel's, and the tests' on a GPU.
PORTABLE := $O/portable/$(SO).$(SO_VERSION)
$(PORTABLE): $(CLIENT_OBJ) $(EXPORTS)
	$(call say,LINK)
	@mkdir -p $(@D)
	$(Q)$(CC) -shared -pthread -Wl,-soname,$(SO).$(SO_VERSION) -Wl,-z,relro,-z,now \
	    $(addprefix -Wl$(comma)--no-undefined-version -Wl$(comma)--version-script=,$(EXPORTS)) $(LDFLAGS) $(CLIENT_OBJ) \
	    -l:libmsgpackc.a $(filter-out -lmsgpackc,$(CLIENT_LIBS)) -o $@
$O/$(SO).$(SO_VERSION): $O/$(SO).$(VERSION)
	$(Q)ln -sf $(<F) $@
$O/$(SO): $O/$(SO).$(SO_VERSION)
	$(Q)ln -sf $(<F) $@

# Touched only when it changes.
$O/commit: FORCE
	@mkdir -p $(@D) && { [ "$$(cat $@ 2>/dev/null)" = '$(COMMIT)' ] || echo '$(COMMIT)' > $@; }
BUILD_OBJ := $(call obj,proto/build.c)
$(BUILD_OBJ): $O/commit
$(BUILD_OBJ): override CPPFLAGS += -DUCM_COMMIT='"$(COMMIT)"' -DUCM_BUILD_CUDA='"$(if $(HAVE_CUDA),with,without) CUDA"'

$O/ucmd: $(call obj,daemon/main.c) $(DAEMON_OBJ) $(BUILD_OBJ)
	$(call say,LINK)
	$(Q)$(LINK) $^ $(DAEMON_LIBS) -o $@
$O/examples/%: $O/obj/client/examples/%.o $O/libucmclient.a
	@mkdir -p $(@D)
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(CLIENT_LIBS) -o $@
CTL_OBJ  := $O/libucmctl.a $O/libucmclient.a
# What ucmctl and ucm-bench become, in Python: they look for them next to themselves.
SCRIPTS := $O/ucmctl-plan $O/ucmctl-import $O/ucmctl-top $O/ucm-bench-serve
$O/ucmctl-plan $O/ucmctl-import $O/ucmctl-top: $O/%: client/ctl/%
$O/ucm-bench-serve: client/bench/ucm-bench-serve
$(SCRIPTS):
	@mkdir -p $(@D)
	$(call say,COPY)
	$(Q)install -m 755 $< $@
BENCH_OBJ := $O/libucmbench.a $(CTL_OBJ)
$O/ucmctl: $(call obj,client/ctl/ucmctl.c) $(BUILD_OBJ) $(CTL_OBJ) | $(SCRIPTS)
	$(call say,LINK)
	$(Q)$(LINK) $^ $(CTL_LIBS) -o $@
# ucm-bench answers what libucmclient_cuda asks of libucmclient.
$O/ucm-bench: $(call obj,client/bench/ucm_bench.c) $(BUILD_OBJ) $(BENCH_OBJ) | $(SCRIPTS)
	$(call say,LINK)
	$(Q)$(LINK) -Wl,--export-dynamic-symbol='ucm_*' $^ $(CTL_LIBS) -luring -ldl -o $@
EVENTS_OBJ := $(call obj,$(EVENTS_SRC))
$(EVENTS_OBJ) $(call obj,client/events/ucmevents.c): override CPPFLAGS += $(if $(HAVE_ZMQ),-DUCM_HAVE_ZMQ -I$(ZMQ_PREFIX)/include)
$O/ucmevents: $(call obj,client/events/ucmevents.c) $(EVENTS_OBJ) $(BUILD_OBJ) $(CTL_OBJ)
	$(call say,LINK)
	$(Q)$(LINK) $(ZMQ_FLAGS) $^ $(CTL_LIBS) $(ZMQ_LIBS) -o $@
# Of what the programs say of themselves.
$(PAGES): client/ctl/pages.py config/ucmd.yaml $(addprefix $O/,$(PAGED))
	@rm -rf $(@D) && mkdir -p $(@D)
	$(call say,PAGES)
	$(Q)python3 -B $< $(@D) config/ucmd.yaml $(addprefix $O/,$(PAGED)) && touch $@
$O/ucm-demo: $(call obj,$(DEMO_SRC) $(RIG_SRC) client/bench/workload.c) $O/libucmclient.a
	$(call say,LINK)
	$(Q)$(LINK_TEST) $^ $(CLIENT_LIBS) -lcjson -o $@

include config/install.mk
include docs/docs.mk
include tests/tests.mk
include tests/gpu/gpu.mk
include tests/engines/engines.mk
include tests/studies/studies.mk

.SECONDARY:
.PHONY: FORCE help all demo run-demo build-demo format clean
-include $(shell find $O/obj -name '*.d' 2>/dev/null)
