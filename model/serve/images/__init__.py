"""OpenAI's route of images: requests for images wait in a queue, and a thread draws them one after another."""
