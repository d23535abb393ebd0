"""`hookscope attention`: what the attention of a transformer looks at."""

from hookscope import options
from hookscope.cli.options import Images, Model, with_options
from hookscope.cli.run_model import run_model


@with_options
def attention(model: Model, images: Images = None, *, option: options.Attention) -> int:
    """Show what the attention of MODEL looks at: maps on the photograph, and numbers of every block and head.

    \b
    hookscope attention vit_b_16 cat.jpg
    hookscope attention timm:vit_small_patch14_reg4_dinov2 cat.jpg --query cls --query register:1
    hookscope attention swin_t cat.jpg --query 120,80 --block 3 --head 0
    hookscope attention vit_b_16 cat.jpg --rollout --report attention.html
    """
    from hookscope import commands

    return run_model(commands.attention, model, images or [], option)
