"""SGLang's own transfers on the GPU at hand, by the paths that its host pools choose."""
