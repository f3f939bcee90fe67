variable "region" {
  description = "Region of everything."
  type        = string
  default     = "us-east-1"
}

variable "name" {
  description = "Name of the cluster."
  type        = string
  default     = "phalanx"
}

variable "availability_zones" {
  description = "Zones of the control plane and the system nodes."
  type        = list(string)
  default     = ["us-east-1a", "us-east-1b"]
}

variable "gpu_availability_zone" {
  description = "The zone in which there is capacity."
  type        = string
  default     = "us-east-1a"
}

variable "api_access_cidrs" {
  description = "Your own addresses, from which you use the Kubernetes API, for example [\"203.0.113.7/32\"]."
  type        = list(string)
}

variable "gpu_node_count" {
  description = "GPU nodes now. Each is paid for by the second from here on."
  type        = number
  default     = 0
}

variable "capacity_reservation" {
  description = "Your capacity reservation, if you have one."
  type = object({
    id    = string
    block = optional(bool, false)
  })
  default = null
}
