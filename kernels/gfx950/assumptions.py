"""What is only assumed about silicon, in one place: nobody here has run these on an MI350X or MI355X."""

from __future__ import annotations

ASSUMPTIONS: tuple[str, ...] = (
    "matrix arithmetic: exact products and one float32 rounding an instruction (exact-rne), or sums of 16 cut "
    "toward zero (cdna3-like); float32 denormals are kept; a scale byte 0xFF makes NaN",
    "matrix layouts other than fp8 16x16x128: 32x32x64 by the same rule, fp6/bf6/fp4 lanes hold 32 consecutive k "
    "packed lowest bits first, 16-bit forms hold consecutive k, float32 ones a k for each lane group",
    "the matrix core ignores EXEC",
    "MFMA wait states are those of LLVM's gfx950 hazard recognizer; an instruction counts one, s_nop N counts N + "
    "1; 16-bit and fp8 forms of 16 x 16 take 4 passes and of 32 x 32 take 8, float32 ones 8 and 16",
    "vmcnt counts loads, stores and LDS fills together and retires in issue order; lgkmcnt retires LDS operations "
    "in issue order and scalar loads in any",
    "LDS operations of one wave run in order; its LDS fills are not ordered with them",
    "a buffer dword is in range iff wrap32(voffset + imm) + soffset + 4(i + 1) <= num_records, also with a "
    "stride; indexed buffers address stride * index + offset, num_records then counts records; swizzled buffers "
    "are refused",
    "out-of-range LDS reads return nothing and writes are dropped; the LDS address of a fill is M0 + imm + lane * "
    "size, M0 taken as 32 bits",
    "ds_read_b64_tr_b{4,8,16} transposes, in each 16 lanes, a tile whose rows of 16 elements lie in consecutive lanes",
    "rcp, rsq, sqrt, exp, log, sin and cos are correctly rounded; NaN payloads are not modelled, NaN results are "
    "some NaN",
    "v_cvt_pk_{fp8,bf8}_f32 without clamp gives NaN (fp8) or infinity (bf8) out of range, with clamp the largest "
    "value; v_cvt_scalef32_* saturates; a NaN into fp4 gives the largest value",
    "float clamp turns NaN into 0 (dx10_clamp); IEEE mode, rounding to nearest and denormals on are taken as the mode",
    "registers, LDS and scratch hold noise when a wave starts; a wave's private memory is its own",
    "v_permlane{16,32}_swap with inactive lanes writes the active ones only",
)
