"""HTTP to one SGLang server."""

from __future__ import annotations

from rollout.engines.http import EngineHttp

API_KEY_VARIABLE = "SGLANG_API_KEY"

# routers pass the older names alone
SERVER_PATHS = ("/server_info", "/get_server_info")
MODEL_PATHS = ("/model_info", "/get_model_info")


class SGLangHttp(EngineHttp):
    """Requests to an SGLang server, with SGLANG_API_KEY of the environment."""

    api_key_variable = API_KEY_VARIABLE
    server = "an SGLang server"
