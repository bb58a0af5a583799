# Tests that need an NVIDIA GPU and nvcc, and the directory that runs them on another host

check-gpu: setup-build ## the tests that need an NVIDIA GPU and nvcc
	$(if $(HAVE_CUDA),,@echo "CUDA toolkit not found: the GPU tests can't be built"; exit 1)
	+@$(SUBMAKE) all gpu-bundle
	$O/gpu/run.sh

ifneq ($(HAVE_CUDA),)
GPU_LIBS    := -L$(CUDA_HOME)/lib64 -L$(CUDA_HOME)/lib64/stubs -lcuda
GPU_RUNTIME := -lcudart_static -ldl -lrt -lstdc++
GPU_NEEDED  := -Wl,--as-needed
# gpu_link COMMAND-AND-LIBRARIES
define gpu_link
@mkdir -p $(@D)
$(call say,LINK)
$(Q)$(1) -o $@
endef
define gpu_compile
@mkdir -p $(@D)
$(call say,NVCC)
$(Q)$(NVCC) -I. -Iclient/include -O2 $(SM80) $(SM90) $(PTX80) -c $< -o $@
endef
# Tests of the device module on a GPU, with workers written in CUDA.
GPU_SRC    := client/cuda/copy_agent.c client/cuda/copy_agent_encoding.c client/cuda/copy_agent_rope.c client/cuda/context.c client/cuda/error.c tests/gpu/copy_agents.c
GPU_OBJ    := $(GPU_SRC:%.c=$O/obj/%.o) $O/libucmdaemon.a $O/libucmclient.a
GPU_TESTS  := $(patsubst tests/gpu/%.c,$O/gpu/%,$(wildcard tests/gpu/test_*.c))

$O/obj/tests/gpu/%.o: tests/gpu/%.cu tests/gpu/worker.h tests/gpu/copy_agents.h
	$(gpu_compile)
$O/gpu/test_%: $O/obj/tests/gpu/test_%.o $(addprefix $O/obj/tests/gpu/,harness.o staging.o worker.o) $(GPU_OBJ)
	$(call gpu_link,$(LINK) $^ $(DAEMON_LIBS) $(GPU_LIBS) $(GPU_RUNTIME))
# The daemon as a whole on a GPU: a client program in CUDA, and the daemon that it starts.
SERVE_OBJ := $(addprefix $O/obj/tests/gpu/,serve.o serve_encoded.o serve_roles.o serve_stream.o serve_worker.o)
$(SERVE_OBJ): $O/obj/tests/gpu/%.o: tests/gpu/%.cu tests/gpu/serve.h client/include/ucmclient.h client/include/ucmclient_cuda.h
	$(gpu_compile)
$O/gpu/test_serve: $(SERVE_OBJ) $O/obj/tests/gpu/serve_ring.o $O/libucmclient_cuda.a $O/libucmclient.a
	$(call gpu_link,$(LINK) $^ $(CLIENT_LIBS) $(GPU_LIBS) $(GPU_RUNTIME))
GPU_TESTS += $O/gpu/test_serve
# Kernels on a GPU against the same in C: summaries and selections, encodings, attention.
SPARSE_TEST_OBJ   := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c $(wildcard tests/gpu/sparse*.c))
ENCODING_TEST_OBJ := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c $(wildcard tests/gpu/encoding*.c))
$O/gpu/test_sparse: $(SPARSE_TEST_OBJ) $O/libucmclient_cuda.a $O/libucmclient.a
	$(call gpu_link,$(LINK) $^ $(GPU_NEEDED) $(CLIENT_LIBS) $(GPU_LIBS))
$O/gpu/test_encoding: $(ENCODING_TEST_OBJ) $O/obj/kernels/encoding/encoding_fatbin.o $O/libucmclient.a
	$(call gpu_link,$(LINK) $^ $(GPU_NEEDED) $(CLIENT_LIBS) $(GPU_LIBS))
ROPE_TEST_OBJ := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c tests/gpu/rope.c kernels/copy_ref.c)
$O/gpu/test_rope: $(ROPE_TEST_OBJ) $(CUDA_OBJ) $O/libucmdaemon.a
	$(call gpu_link,$(LINK) $^ $(GPU_NEEDED) $(GPU_LIBS) -lm)
ENTRIES_TEST_OBJ    := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c tests/gpu/mapping.c $(wildcard tests/gpu/entries*.c) $(wildcard kernels/entries/*.c))
$O/gpu/test_entries: $(ENTRIES_TEST_OBJ) $O/obj/kernels/entries/entries_fatbin.o
	$(call gpu_link,$(LINK) $^ $(GPU_LIBS))
ATTEND_TEST_OBJ := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c $(wildcard tests/gpu/attend*.c) $(wildcard kernels/entries/*.c))
$O/gpu/test_attend: $(ATTEND_TEST_OBJ) $(ATTEND_CUDA_OBJ) $(ATTEND_OBJ) $O/obj/kernels/entries/entries_fatbin.o $O/libucmclient.a
	$(call gpu_link,$(LINK) $^ $(GPU_NEEDED) $(CLIENT_LIBS) $(GPU_LIBS) -lm)
DECODE_TEST_OBJ := $(patsubst %.c,$O/obj/%.o,tests/gpu/compare.c tests/gpu/mapping.c $(wildcard tests/gpu/decode*.c)) \
                   $(patsubst %.c,$O/obj/%.o,kernels/entries/verify.c)
$O/gpu/test_decode: $(DECODE_TEST_OBJ) $(ATTEND_OBJ) $O/libucmclient_cuda.a $O/libucmclient.a
	$(call gpu_link,$(LINK) $^ $(GPU_NEEDED) $(CLIENT_LIBS) $(GPU_LIBS) -lm)
GPU_TESTS += $O/gpu/test_sparse $O/gpu/test_encoding $O/gpu/test_rope $O/gpu/test_entries $O/gpu/test_attend $O/gpu/test_decode
# CopyAgents for Python tests that speak the protocol by themselves.
GPU_COPY_AGENTS := $O/gpu/copy_agents.so
$(GPU_COPY_AGENTS): $O/obj/tests/gpu/copy_agents.o $O/libucmclient_cuda.a $O/libucmclient.a
	$(call gpu_link,$(CC) -shared -pthread $(LDFLAGS) $^ $(CLIENT_LIBS) $(GPU_LIBS))

# A directory that runs on a host with a GPU and without Debian's packages. It has programs, the
# libraries that they need beyond the C library, and run.sh. The daemon starts itself again, and
# processes for directories, with an environment of their own. These find the bundle's libraries.
BESIDE     := -Wl,--disable-new-dtags,-rpath,'$$ORIGIN/lib'
GPU_DAEMON := $O/gpu/ucmd $O/gpu/ucmd-backend-directory
$O/gpu/ucmd: $(call obj,daemon/main.c) $(DAEMON_OBJ) $(BUILD_OBJ)
	$(call gpu_link,$(LINK) $(BESIDE) $^ $(DAEMON_LIBS))
$O/gpu/ucmd-backend-directory: $(call obj,$(wildcard daemon/backend/directory/*.c)) $O/libucmbackend.a
	$(call gpu_link,$(LINK) $(BESIDE) $^ -lmsgpackc)
gpu-bundle: $(BINS) $(GPU_DAEMON) $(GPU_TESTS) $(GPU_COPY_AGENTS) $(LIBS) $O/portable/libucmclient.so.0 $O/encoding_kernels.so
	rm -rf $O/gpu/python
	@mkdir -p $O/gpu/lib $O/gpu/python/client $O/gpu/python/tests/integration $O/gpu/python/tests/engines
	cp -r client/python $O/gpu/python/client
	cp $O/portable/libucmclient.so.0 $(PORTABLE_CUDA) $O/gpu/python/client/python/ucmclient
	cp -r tests/engines/vllm $O/gpu/python/tests/engines
	cp $(addprefix tests/integration/,daemon.py vllm_case.py vllm_paths.py test_vllm_connector.py test_vllm_trouble.py test_vllm_copy_agent.py cuda_paths.py fake_tensor.py fake_source.py test_sparse_cuda.py test_decode_cuda.py test_decode_gpu.py second_client.py encoding_case.py encoding_gpu.py test_encoding.py test_encoding_life.py test_encoding_hostile.py test_forms.py client_paths.py test_page_store.py test_trtllm.py test_ucm_store.py) $O/gpu/python/tests/integration
	@mkdir -p $O/gpu/python/docs
	cp docs/protocol.md docs/methods.md docs/metrics.md $O/gpu/python/docs
	cp $O/encoding_kernels.so $O/gpu
	@mkdir -p $O/gpu/python/tests/gpu $O/gpu/python/systemd
	cp tests/gpu/isolation.py tests/gpu/isolated_worker.py tests/gpu/sandbox.py tests/gpu/theft.py tests/gpu/shifted.py tests/gpu/plugins_torch.py $O/gpu/python/tests/gpu
	cp systemd/ucmd.service $O/gpu/python/systemd
	-systemd-analyze syscall-filter --no-pager >$O/gpu/python/tests/gpu/syscall-groups.txt
	-cp -L $$(/sbin/ldconfig -p | awk '/libseccomp.so.2/ {print $$NF; exit}') $O/gpu/lib
	rm -f $(filter-out $(GPU_TESTS),$(wildcard $O/gpu/test_*))
	cp tests/gpu/run.sh tests/gpu/all.sh tests/gpu/table.py $(filter-out $O/ucmd,$(BINS)) $O/gpu
	cp $O/$(SO).$(SO_VERSION) $O/$(CUDA_SO).$(SO_VERSION) $O/gpu/lib
	ldd $(GPU_TESTS) $(BINS) | awk '/=> \// {print $$3}' | sort -u | \
	    grep -vE '/(libc|libm|libdl|librt|libpthread|libresolv|libstdc\+\+|libgcc_s|libcuda|ld-linux[^/]*)\.so' | \
	    xargs -I '{}' cp -L '{}' $O/gpu/lib
gpu-tests: $(GPU_TESTS) $(GPU_COPY_AGENTS)
.PHONY: gpu-bundle gpu-tests

endif
.PHONY: check-gpu
