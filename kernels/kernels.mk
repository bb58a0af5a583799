# Kernels in C: summaries and selection, encodings, re-rotation and attention. A simd/ is compiled for each instruction set.

KERNEL_SRC   := $(wildcard kernels/*.c kernels/simd/*.c)
SPARSE_SRC   := $(wildcard kernels/sparse/*.c)
ENCODING_SRC := $(wildcard kernels/encoding/*.c)
ROPE_SRC     := $(wildcard kernels/rope/*.c)
# The references of what runs on a GPU only: no library has them, tests and tools do.
ATTEND_SRC   := $(wildcard kernels/attend/*.c)
SLOTS_SRC    := $(wildcard kernels/entries/*.c)
KERNEL_ISA   := base $(if $(filter x86_64-%,$(shell $(CC) -dumpmachine 2>/dev/null)),avx2 avx512)
# simd_obj MODULE ISA...
simd_obj = $(foreach isa,$(2),$(patsubst kernels/$(1)/simd/%.c,$O/obj/kernels/$(1)/$(isa)/%.o,$(wildcard kernels/$(1)/simd/*.c)))
SPARSE_OBJ := $(call obj,$(SPARSE_SRC)) $(call simd_obj,sparse,$(KERNEL_ISA))
ENCODING_OBJ := $(call obj,$(ENCODING_SRC)) $(call simd_obj,encoding,$(filter-out base,$(KERNEL_ISA)))
ROPE_OBJ := $(call obj,$(ROPE_SRC)) $(call simd_obj,rope,$(filter-out avx512,$(KERNEL_ISA)))
ATTEND_OBJ := $(call obj,$(ATTEND_SRC))

# Where variables of inlined vectors lie takes a compiler a quarter of its time: lines only.
KERNEL_DEBUG := $(if $(filter-out -g0,$(filter -g%,$(CFLAGS))),-g1)
# AddressSanitizer's checks are calls here: inline, they take a compiler up to four times as long.
ifneq ($(findstring address,$(SAN)),)
KERNEL_CHECKS := $(if $(findstring clang,$(CC)),-mllvm -,--param=)asan-instrumentation-with-call-threshold=0
endif

# The same bits from every compiler, for every instruction set and on a GPU: nothing is contracted.
# Summaries and encodings must not slow a dump, so these are optimised in every build.
KERNEL_CFLAGS := -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math \
                 $(if $(filter avx2,$(KERNEL_ISA)),-DUCM_ISA_X86) $(KERNEL_DEBUG) $(KERNEL_CHECKS)
KERNEL_CFLAGS_base   :=
KERNEL_CFLAGS_avx2   := -mavx2 -mfma -mf16c -mpopcnt
KERNEL_CFLAGS_avx512 := $(KERNEL_CFLAGS_avx2) -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vpopcntdq \
                        -mprefer-vector-width=512
$(call obj,kernels/simd/isa.c $(SPARSE_SRC) $(ENCODING_SRC) $(ROPE_SRC) $(ATTEND_SRC)): override CFLAGS += $(KERNEL_CFLAGS)
# simd_rule MODULE ISA FLAGS
define simd_rule
$O/obj/kernels/$(1)/$(2)/%.o: kernels/$(1)/simd/%.c
	@mkdir -p $$(@D)
	$$(call say,CC)
	$$(Q)$$(CC) $$(CFLAGS_ALL) $$(KERNEL_CFLAGS) $(3) -DUCM_ISA=$(2) -c $$< -o $$@
endef
# A reference of tests, which would have it slow there.
$(ATTEND_OBJ): override SANFLAGS :=
# What UBSan sees in the source of sets it sees in the smallest of them; with it the others take a compiler three times as long.
UNDEFINED := $(if $(findstring undefined,$(SAN)),-fno-sanitize=undefined)
# No fuzz target gets as far as those of sparse/, and counting their branches takes a compiler long.
UNCOUNTED := $(if $(findstring fuzzer,$(SAN)),-fno-sanitize=fuzzer-no-link)
$(foreach isa,$(KERNEL_ISA),$(eval $(call simd_rule,sparse,$(isa),$(KERNEL_CFLAGS_$(isa)) $(UNCOUNTED) $(if $(filter avx%,$(isa)),$(UNDEFINED)))))
$(foreach isa,$(KERNEL_ISA),$(eval $(call simd_rule,encoding,$(isa),$(KERNEL_CFLAGS_$(isa)) $(if $(filter avx512,$(isa)),$(UNDEFINED)))))
# No instruction to fuse with: gcc 12 makes vfmaddsub of a pair's rotation, whatever -ffp-contract says.
$(foreach isa,$(filter-out avx512,$(KERNEL_ISA)),$(eval $(call simd_rule,rope,$(isa),$(KERNEL_CFLAGS_$(isa)) $(if $(filter avx%,$(isa)),-mno-fma) $(UNCOUNTED))))
