"""SGLang over HTTP: the engine, the doctor, and the control of a server."""
