# GPU support: what of CUDA there is, the kernels, the copy agent library. Sets CUDA_OBJ (linked into the daemon),
# CUDA_CPPFLAGS, CUDA_LIBS, and OTHER_CUDA: the sources of the daemon that this build leaves out.
#
# The daemon needs CUDA's headers and nvcc to build, and nothing of CUDA to start: libcuda.so.1 is
# opened while it runs. Without the toolkit, daemon/cuda/none.c takes the place of the others.

NVCC ?= $(firstword $(shell command -v nvcc 2>/dev/null) $(wildcard /usr/local/cuda/bin/nvcc))
GPU  ?= yes
# GPU code is the same whatever compiles the rest: `make check` builds it once for all its phases.
FATBINS ?= $(BUILD)/fatbin
CUDA_HOME ?= $(or $(patsubst %/bin/nvcc,%,$(realpath $(NVCC))),/usr/local/cuda)
HAVE_CUDA := $(and $(filter-out no,$(GPU)),$(NVCC),$(wildcard $(CUDA_HOME)/include/cuda.h))

ifneq ($(HAVE_CUDA),)

OTHER_CUDA    := daemon/cuda/none.c
CUDA_CPPFLAGS := -isystem $(CUDA_HOME)/include

# Machine code is for the GPUs that it was measured on. For another one the driver compiles PTX, once, when it is first opened, and
# keeps it. What uses clusters, bulk copies or launches that depend on others has a form of its own from compute capability 9.0 on.
SM80     := -gencode arch=compute_80,code=sm_80
SM90     := -gencode arch=compute_90,code=sm_90
PTX80    := -gencode arch=compute_80,code=compute_80
PTX90    := -gencode arch=compute_90,code=compute_90
# For hundreds of kernels: the front end runs once for both.
SM90_80  := -gencode arch=compute_80,code=sm_90 $(PTX80)

# What is contracted is written so, in C and in CUDA: bits are those of the C.
EXACT    := -fmad=false

# fatbin_obj PATH: the object that has PATH.cu's fatbin as ucm_NAME_fatbin.
fatbin_obj = $O/obj/$(1)_fatbin.o
# fatbin PATH FLAGS
define fatbin
$(call fatbin_obj,$(1)): kernels/fatbin.S $(FATBINS)/$(notdir $(1)).fatbin
	@mkdir -p $$(@D)
	$$(call say,CC)
	$$(Q)$$(CC) -DUCM_FATBIN_SYMBOL=ucm_$(notdir $(1))_fatbin -DUCM_FATBIN='"$(FATBINS)/$(notdir $(1)).fatbin"' -c $$< -o $$@
$(if $(2),$(call fatbin_rule,$(FATBINS)/$(notdir $(1)).fatbin,$(1).cu,$(2)))
endef
# fatbin_rule FATBIN SOURCE FLAGS
define fatbin_rule
$(1): $(2)
	@mkdir -p $$(@D)
	$$(call say,NVCC)
	$$(Q)$$(NVCC) -I. -O3 $(3) -MMD -MP -MF $(1:.fatbin=.d) -MT $$@ -fatbin $$< -o $$@
endef

# For the daemon and for workers: copies, re-rotation, encodings.
$(eval $(call fatbin,kernels/copy,$(SM80) $(SM90) $(PTX80)))
$(eval $(call fatbin,kernels/rope/rope,$(EXACT) $(SM90) $(PTX80)))
$(eval $(call fatbin,kernels/encoding/encoding,$(EXACT) $(SM90) $(PTX80)))
CUDA_OBJ := $(foreach path,kernels/copy kernels/rope/rope kernels/encoding/encoding,$(call fatbin_obj,$(path)))

# For workers: summaries and selections; a pool, and attention over it.
$(foreach name,summary select,$(eval $(call fatbin,kernels/sparse/$(name),$(EXACT) $(SM90_80))))
$(foreach name,select_cluster select_stream,$(eval $(call fatbin,kernels/sparse/$(name),$(EXACT) $(SM90) $(PTX90))))
$(eval $(call fatbin,kernels/sparse/select_rare))
$(eval $(call fatbin,kernels/entries/entries,$(SM90) $(PTX90) $(PTX80)))
$(foreach name,attend mla,$(eval $(call fatbin,kernels/attend/$(name),$(EXACT) $(SM90) $(PTX90) $(PTX80))))
ATTEND_CUDA_OBJ := $(foreach name,attend mla,$(call fatbin_obj,kernels/attend/$(name)))
SPARSE_CUDA_OBJ := $(foreach name,summary select select_rare select_cluster select_stream,$(call fatbin_obj,kernels/sparse/$(name))) \
                   $(call fatbin_obj,kernels/entries/entries) $(ATTEND_CUDA_OBJ) $O/obj/kernels/entries/entries.o

# Each of these kernels ends in the same functions. Compiled in one go each would get machine code of its own of them, which takes
# four times as long; so they are compiled once, and linked. 128 registers are what a thread of 512 has.
$(FATBINS)/select_rare.fatbin: kernels/sparse/select_rare.cu
	@mkdir -p $(@D)
	$(call say,NVCC)
	$(Q)$(NVCC) -I. -O3 $(EXACT) -MMD -MP -MF $(@:.fatbin=.d) -MT $@ -ptx -arch=compute_80 $< -o $@.ptx
	$(Q)$(NVCC) -O3 -arch=sm_90 -rdc=true -maxrregcount=128 -cubin $@.ptx -o $@.parts.cubin
	$(Q)$(NVCC) -arch=sm_90 -dlink -cubin $@.parts.cubin -o $@.cubin
	$(Q)$(CUDA_HOME)/bin/fatbinary -64 --compress-all --create=$@ --image3=kind=elf,sm=90,file=$@.cubin --image3=kind=ptx,sm=80,file=$@.ptx
	@rm -f $@.ptx $@.parts.cubin $@.cubin

# What ucm-bench runs on a GPU.
BENCH_FATBIN := $(FATBINS)/bench.fatbin
$(eval $(call fatbin_rule,$(BENCH_FATBIN),client/bench/kernels.cu,$(SM80) $(SM90) $(PTX80)))

ALL_FATBINS := $(addprefix $(FATBINS)/,$(addsuffix .fatbin,copy rope encoding summary select select_rare select_cluster select_stream entries attend mla bench))
fatbins: $(ALL_FATBINS)
-include $(wildcard $(FATBINS)/*.d)

$O/obj/client/cuda/sparse_select.o $O/obj/client/cuda/decode_plan.o: override CFLAGS += -fno-math-errno # the square root is an instruction, as in kernels/sparse

# The copy_agent, for workers: libcuda is theirs already, libucmclient next to it, wherever the two lie.
CUDA_SO     := libucmclient_cuda.so
CUDA_CLIENT := $(patsubst %.c,$O/obj/%.o,$(wildcard client/cuda/*.c)) $O/obj/kernels/rope/check.o
LIBS        += $O/libucmclient_cuda.a $O/$(CUDA_SO).$(VERSION) $O/$(CUDA_SO).$(SO_VERSION) $O/$(CUDA_SO)

$O/libucmclient_cuda.a: $(CUDA_CLIENT) $O/obj/proto/memory/staging.o $(CUDA_OBJ) $(SPARSE_CUDA_OBJ)
	$(call say,AR)
	$(Q)rm -f $@ && ar rcs $@ $^
$O/$(CUDA_SO).$(VERSION): $(CUDA_CLIENT) $O/obj/proto/memory/staging.o $(CUDA_OBJ) $(SPARSE_CUDA_OBJ) client/cuda/libucmclient_cuda.map $O/$(SO) $(SPARSE_OBJ) $(ENCODING_OBJ) $(call obj,kernels/simd/isa.c)
	$(call say,LINK)
	$(Q)$(CC) $(SANFLAGS) -shared -pthread $(if $(SAN),,-Wl,-z,defs) -Wl,-soname,$(CUDA_SO).$(SO_VERSION) -Wl,-z,relro,-z,now \
	    -Wl,--version-script=client/cuda/libucmclient_cuda.map -Wl,--no-undefined-version -Wl,-rpath,'$$ORIGIN' $(LDFLAGS) $(filter %.o,$^) \
	    -L$O -lucmclient -L$(CUDA_HOME)/lib64/stubs -lcuda -o $@
$O/$(CUDA_SO).$(SO_VERSION): $O/$(CUDA_SO).$(VERSION)
	@ln -sf $(<F) $@
# Portable as it is: beyond the two it needs the C library only.
PORTABLE_CUDA := $O/$(CUDA_SO).$(SO_VERSION)
$O/$(CUDA_SO): $O/$(CUDA_SO).$(SO_VERSION)
	@ln -sf $(<F) $@

else
OTHER_CUDA := $(filter-out daemon/cuda/none.c,$(wildcard daemon/cuda/*.c))
endif
.PHONY: fatbins
