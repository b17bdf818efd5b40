"""OpenAI's API: requests, answers, chats, tools and transcriptions."""
