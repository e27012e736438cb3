"""vLLM over HTTP: its token route, which returns sampling masks from 0.28 on."""
