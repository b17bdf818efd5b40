"""Pictures of coloured shapes with captions: what the image model `shapes` is trained on and judged by."""
