"""The arguments of these kernels."""

EXAMPLES = {
    "elementwise:scaled": ("f32[200,1000]", "3.0"),
    "elementwise:shifted": ("bf16[200,600]", "shift=2.0"),
    "elementwise:doubled": ("f32[130,96]",),
    "elementwise:picked": ("f32[2,40,64]", "i32[1,1]"),
}
