"""An engine without a GPU: vLLM's cache, scheduler, API and event stream; made-up tokens in computed time."""
