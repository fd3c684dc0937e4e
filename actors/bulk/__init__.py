"""The bulk endpoint: OpenAI's shape over Ray Serve, batches by the pipeline of the jobs."""

ENGINE = "Engine"  # name of the model deployment
