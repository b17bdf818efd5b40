"""Options of `nkw imagine`."""

from model.commands.options import option, options

OPTIONS = options(
    "prompt=IMAGE --model=IMAGES",
    "--negative-prompt --steps --guidance --guidance-passes --images --size --latents",
    option("--seed", help="of the noise of the first image (default: %(default)s)"),
    "--out=PNG --grid --save-steps",
    "--target --tp --ulysses-degree",
    option(
        "--dp",
        help="groups of such ranks, which share images and the passes of guidance (default: %(default)s)",
    ),
    "--lnc --hardware",
    option("--backend", choices=("simulate", "numpy"), help="simulate or numpy (default: %(default)s)"),
    option(
        "--no-check", help="do not compare the images with the numpy model; times are predicted all the same"
    ),
    option(
        "--quantization",
        help="quantise linear layers of the denoiser's blocks to fp8, int8, fp8-dynamic (which quantises rows too) or "
        "int4, with a scale for each output (default: as config.json says)",
    ),
    "--dtype",
    option("--trace", help="write the predicted timeline of a pass of each component; opens in Perfetto"),
    "--profile --html",
    option(
        "--explain",
        help="show how pass N of the denoiser came about (default: the first): tokens that patches attend to, norms of "
        "the residual, guidance",
    ),
    "--json",
)
