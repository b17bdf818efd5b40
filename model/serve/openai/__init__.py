"""OpenAI's API: requests, answers, chats, tool calls and transcriptions."""
