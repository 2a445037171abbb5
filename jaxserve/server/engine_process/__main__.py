"""The program that ``EngineClient`` starts."""

from jaxserve.server.engine_process.process import main

if __name__ == "__main__":
    main()
