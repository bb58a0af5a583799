# ucmd: `make demo` runs the main job, `make check` the tests; both set up what they need first.

VERSION := 0.1.0
CC      ?= gcc
comma   := ,

# SAN=address,undefined or SAN=thread builds everything with sanitizers, into a folder of its own.
SAN ?=
BUILD ?= build
ifneq ($(SAN),)
O        := $(BUILD)/san-$(firstword $(subst $(comma), ,$(SAN)))
SANFLAGS := -fsanitize=$(SAN) -fno-omit-frame-pointer -fno-sanitize-recover=all
else
O        := $(BUILD)
endif

WARN   := -Wall -Wextra -Wpedantic -Werror -Wshadow -Wstrict-prototypes -Wmissing-prototypes \
          -Wpointer-arith -Wvla
CFLAGS ?= -O2 -g
CPPFLAGS_ALL = -D_GNU_SOURCE -DUCM_VERSION='"$(VERSION)"' -I. -Iclient/include
CFLAGS_ALL   = -std=c11 $(CPPFLAGS_ALL) -fPIC -pthread $(WARN) $(CFLAGS) $(SANFLAGS) -MMD -MP

DAEMON_LIBS = -luv -luring -lmsgpackc -lcrypto -lxxhash -lyaml -lsystemd -ldl -lm
CLIENT_LIBS = -lmsgpackc -lcrypto
CTL_LIBS    = $(CLIENT_LIBS) -lcjson

PROTO_SRC   := $(wildcard proto/*.c)
KERNEL_SRC  := $(wildcard kernels/*.c)
DAEMON_SRC  := $(filter-out daemon/main.c,$(wildcard daemon/*.c daemon/*/*.c))
CLIENT_SRC  := $(wildcard client/lib/*.c)
CTL_SRC     := $(wildcard client/ctl/*.c)
BENCH_SRC   := $(wildcard tests/bench/*.c)
UNIT_TESTS  := $(patsubst tests/%.c,$O/tests/%,$(wildcard tests/unit/test_*.c))

obj = $(patsubst %.c,$O/obj/%.o,$(1))
DAEMON_OBJ := $(call obj,$(PROTO_SRC) $(KERNEL_SRC) $(DAEMON_SRC))
CLIENT_OBJ := $(call obj,$(PROTO_SRC) $(CLIENT_SRC))

$O/obj/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CFLAGS_ALL) -c $< -o $@

$O/ucmd: $(call obj,daemon/main.c) $(DAEMON_OBJ)
	$(CC) $(SANFLAGS) -pthread $^ $(DAEMON_LIBS) -o $@

$O/libucmdaemon.a: $(DAEMON_OBJ)
	rm -f $@ && ar rcs $@ $^
$O/libucmclient.a: $(CLIENT_OBJ)
	rm -f $@ && ar rcs $@ $^

# A unit test links both libraries as archives: only the rooms that it names are pulled in.
$O/tests/unit/%: $O/obj/tests/unit/%.o $O/libucmdaemon.a $O/libucmclient.a
	@mkdir -p $(@D)
	$(CC) $(SANFLAGS) -pthread $< $O/libucmclient.a $O/libucmdaemon.a $(DAEMON_LIBS) -lcjson -lcriterion -o $@

unit: $(UNIT_TESTS)
	@for t in $^; do echo "== $$t"; $$t || exit 1; done

clean:
	rm -rf $(BUILD)
.PHONY: unit clean
-include $(shell find $O/obj -name '*.d' 2>/dev/null)
