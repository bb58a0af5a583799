/* Compiled kernels as read-only data: UCM_FATBIN is the path, UCM_FATBIN_SYMBOL its name here. */
    .section .rodata
    .global UCM_FATBIN_SYMBOL
    .hidden UCM_FATBIN_SYMBOL
    .type UCM_FATBIN_SYMBOL, %object
    .balign 16
UCM_FATBIN_SYMBOL:
    .incbin UCM_FATBIN
    .size UCM_FATBIN_SYMBOL, . - UCM_FATBIN_SYMBOL
    .section .note.GNU-stack, "", %progbits
