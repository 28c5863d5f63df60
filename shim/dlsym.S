// dlsym: the interposer, in assembly in every build type. It asks C++ where to go and *jumps* there with the caller's
// arguments and return address untouched, so that the real dlsym still resolves RTLD_NEXT relative to the caller
// (contract §1: a C++ forward does not stay a tail call in every build).

#if defined(__x86_64__)
        .text
        .globl  dlsym
        .type   dlsym, @function
dlsym:
        .cfi_startproc
        endbr64
        pushq   %rdi
        .cfi_adjust_cfa_offset 8
        pushq   %rsi
        .cfi_adjust_cfa_offset 8
        subq    $8, %rsp
        .cfi_adjust_cfa_offset 8
        call    cushion_dlsym_target
        addq    $8, %rsp
        .cfi_adjust_cfa_offset -8
        popq    %rsi
        .cfi_adjust_cfa_offset -8
        popq    %rdi
        .cfi_adjust_cfa_offset -8
        jmp     *%rax
        .cfi_endproc
        .size   dlsym, . - dlsym
#elif defined(__aarch64__)
        .text
        .globl  dlsym
        .type   dlsym, %function
dlsym:
        .cfi_startproc
        hint    #34                     // bti c
        stp     x29, x30, [sp, #-32]!
        .cfi_def_cfa_offset 32
        .cfi_offset 29, -32
        .cfi_offset 30, -24
        mov     x29, sp
        stp     x0, x1, [sp, #16]
        bl      cushion_dlsym_target
        mov     x16, x0
        ldp     x0, x1, [sp, #16]
        ldp     x29, x30, [sp], #32
        .cfi_def_cfa_offset 0
        br      x16
        .cfi_endproc
        .size   dlsym, . - dlsym
#else
#error "Cushion's dlsym is written for x86-64 and arm64"
#endif

        .section .note.GNU-stack, "", %progbits
