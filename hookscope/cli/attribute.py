"""`hookscope attribute`: where a network looks in a picture."""

from hookscope import options
from hookscope.cli.options import Images, Model, with_options
from hookscope.cli.run_model import run_model


@with_options
def attribute(model: Model, images: Images = None, *, option: options.Attribute) -> int:
    """Draw where MODEL looks: which places of a picture, signal or volume the score for a class comes from.

    \b
    hookscope attribute demo cat.jpg
    hookscope attribute resnet34 photos/ --top 3 --report looks.html
    hookscope attribute demo cat.jpg --target 'tabby-tiger cat' --method layer-cam
    hookscope attribute model.pt cat.jpg --target 281 --layer layer3 --layer layer4
    """
    from hookscope import commands

    return run_model(commands.attribute, model, images or [], option)
