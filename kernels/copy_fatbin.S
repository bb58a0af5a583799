/* The compiled kernels as read-only data: UCM_COPY_FATBIN is the path of build/copy.fatbin. */
    .section .rodata
    .global ucm_copy_fatbin
    .hidden ucm_copy_fatbin
    .type ucm_copy_fatbin, %object
    .balign 16
ucm_copy_fatbin:
    .incbin UCM_COPY_FATBIN
    .size ucm_copy_fatbin, . - ucm_copy_fatbin
    .section .note.GNU-stack, "", %progbits
